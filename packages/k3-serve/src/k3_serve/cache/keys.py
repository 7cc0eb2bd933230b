"""Chained keys of token prefixes (report 5.4, hash blocks; architecture 6).

The key of unit i is a hash of the key of unit i - 1 and of the tokens of unit i, so an equal
key proves an equal prefix, and one look-up of the last key stands for the whole prompt. The
chain starts from a seed that holds everything else the cached bytes depend on: the version of
the weights, the tenant's salt and the dtype of the state. Two tenants never share a key.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16
"""Length of a key. 128 bits of a cryptographic hash: a tenant cannot construct a collision."""


def seed_key(version: int, salt: str, state_dtype: str) -> bytes:
    """The key of the empty prefix.

    version: number of the weights, raised by every update, so that no state of older weights
    matches. salt: the tenant's cache salt, "" for the shared cache. state_dtype: name of the
    dtype in which KDA states are kept.
    """
    digest = blake2b(struct.pack("<q", version), digest_size=KEY_BYTES, person=b"k3-prefix-seed")
    for text in (salt, state_dtype):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<q", len(data)) + data)
    return digest.digest()


def unit_keys(
    seed: bytes,
    ids: Sequence[int],
    unit: int,
    images: Sequence[tuple[int, bytes]] = (),
) -> list[bytes]:
    """Keys of every whole unit of `ids`; a rest of fewer than `unit` tokens has no key.

    images: (position of the image's first token, hash of its content). Placeholder tokens are
    equal for all images, so the content enters the key of the unit that holds the position, and
    by the chain every later one.
    """
    return extend_unit_keys([], seed, ids, unit, images)


def extend_unit_keys(
    keys: list[bytes],
    seed: bytes,
    ids: Sequence[int],
    unit: int,
    images: Sequence[tuple[int, bytes]] = (),
) -> list[bytes]:
    """Append to `keys`, the keys of the first units of `ids`, those of the further whole units.

    Only new units are hashed, so a growing sequence costs O(1) a token. Returns `keys`.
    """
    if unit < 1:
        raise ValueError(f"unit is {unit}; a match unit has at least 1 token")
    done = len(keys) * unit
    for position, _ in images:
        if position < 0:
            raise ValueError(f"an image is at position {position}; positions start at 0")
    late = sorted(image for image in images if image[0] >= done)
    layout = struct.Struct(f"<{unit}q")
    previous = keys[-1] if keys else seed
    for start in range(done, len(ids) - unit + 1, unit):
        digest = blake2b(previous, digest_size=KEY_BYTES, person=b"k3-prefix-unit")
        digest.update(layout.pack(*ids[start : start + unit]))
        while late and late[0][0] < start + unit:
            position, content = late.pop(0)
            digest.update(struct.pack("<qq", position, len(content)) + content)
        previous = digest.digest()
        keys.append(previous)
    return keys
