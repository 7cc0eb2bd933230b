"""A prompt as rows: what the keys of its prefixes are made of (report 2.6; rule I12)."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from k3_core.config import K3Config
from k3_core.engine.protocol import Images
from k3_core.engine.runner import rows_of_images

Places = tuple[tuple[int, bytes], ...]
"""(first row, content hash) of each image."""


def rows_and_images(
    ids: Iterable[int], images: Images | None, config: K3Config
) -> tuple[list[int], Places]:
    """Ids with each image's placeholder once a row, and the images' places and hashes."""
    if images is None:
        return list(ids), ()
    counts = iter(rows_of_images(config, images))
    hashes = iter(_hashes(images))
    rows: list[int] = []
    places = []
    for token_id in ids:
        is_pad = token_id == config.media_placeholder_token_id
        if is_pad and (count := next(counts, None)) is not None:
            places.append((len(rows), next(hashes)))
            rows += [token_id] * count
        else:
            rows.append(token_id)
    return rows, tuple(places)


def end_of_images(rows: list[int], places: Places, config: K3Config) -> int:
    """The row after the last image row."""
    placeholder = config.media_placeholder_token_id
    if not places or placeholder is None:
        return 0
    return len(rows) - rows[::-1].index(placeholder)


def _hashes(images: Images) -> list[bytes]:
    """Hash of each image's pixels and grid."""
    sizes = images.grid_thws.prod(-1).tolist()
    hashes = []
    for pixels, grid in zip(images.pixel_values.split(sizes), images.grid_thws, strict=True):
        data = pixels.detach().float().cpu().contiguous().numpy().tobytes()
        header = repr((tuple(pixels.shape), grid.tolist())).encode()
        hashes.append(blake2b(header + data, digest_size=16).digest())
    return hashes
