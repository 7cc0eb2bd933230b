"""A request taken out of an engine as plain data, to continue later or elsewhere.

Partial rollouts pause at the end of an iteration and continue under newer weights (report 5.3.1).
What a request needs to continue is its ids so far and its seed: randomness depends on the
position only, and the caches are a function of the ids, so the next prefill restores them.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from k3_core.engine.protocol import Images, Request, Sampling

FORMAT = 1
PLAIN = ("channel", "effort", "priority", "request_class", "cache_salt", "num_head_tokens")


@dataclass(frozen=True, eq=False)
class Suspended:
    """The request, with its seed fixed, and the ids generated before it was suspended."""

    request: Request
    generated: tuple[int, ...]

    def to_json(self) -> str:
        """The state as one JSON object; tensors as base64 of little-endian bytes.

        Raises ValueError with a constraint, which is code: take it off and put it on again.
        """
        request = self.request
        if request.constraint is not None:
            raise ValueError("a constraint has no JSON form; replace(request, constraint=None)")
        fields = {name: getattr(request, name) for name in PLAIN}
        state = {
            "format": FORMAT,
            "generated": self.generated,
            "token_ids": request.token_ids,
            "sampling": asdict(request.sampling),
            "images": None if request.images is None else _pack_images(request.images),
            **fields,
        }
        return json.dumps(state, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Suspended:
        """The inverse of `to_json`; ValueError for another format."""
        state: dict[str, Any] = json.loads(text)
        if state.pop("format", None) != FORMAT:
            raise ValueError(f"not a suspended request of format {FORMAT}: {text[:80]!r}")
        sampling = state.pop("sampling")
        bias = {int(token_id): value for token_id, value in sampling.pop("logit_bias").items()}
        for name in ("stop", "stop_ids"):
            sampling[name] = tuple(sampling[name])
        images = state.pop("images")
        generated = tuple(state.pop("generated"))
        token_ids = tuple(state.pop("token_ids"))
        request = Request(
            token_ids=token_ids,
            sampling=Sampling(logit_bias=bias, **sampling),
            images=None if images is None else _unpack_images(images),
            **state,
        )
        return cls(request, generated)


def with_seed(request: Request, seed: int) -> Request:
    """The request with its seed fixed."""
    return replace(request, sampling=replace(request.sampling, seed=seed))


def _pack_images(images: Images) -> dict[str, Any]:
    pixels = images.pixel_values.detach().float().cpu().contiguous()
    return {
        "pixel_values": base64.b64encode(pixels.numpy().astype("<f4").tobytes()).decode(),
        "shape": list(pixels.shape),
        "grid_thws": images.grid_thws.tolist(),
    }


def _unpack_images(packed: dict[str, Any]) -> Images:
    import numpy as np
    import torch

    flat = np.frombuffer(base64.b64decode(packed["pixel_values"]), dtype="<f4")
    pixels = torch.from_numpy(flat.astype(np.float32)).view(packed["shape"])
    return Images(pixels, torch.tensor(packed["grid_thws"], dtype=torch.long))
