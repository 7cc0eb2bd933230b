"""The battery of depth mixers: the same sublayer outputs, read by read, against the default mixer.

T tokens, D model width.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from k3_core.modules import Linear, RMSNorm
from k3_core.plugins import Impl, resolve
from k3_core.residual.base import Site
from k3_core.testing.compare import Results, differences, gradients
from k3_core.testing.tolerance import TOLERANCE
from k3_core.testing.values import Values

NUM_LAYERS, NUM_TOKENS, WIDTH = 5, 7, 24
# Running sums round once a layer.
MIXER_FACTOR = 4.0


def compare_mixer(
    target: Any, impl: Impl, case: str, dtype: torch.dtype, device: str
) -> Iterator[str]:
    """One line for each read, or gradient of a written output, that is off."""
    del case
    default = resolve("depth_mixer", impl.implements, name="default", dtype="float64").load()
    has_backward = "backward" in impl.features
    values = Values(dtype, device)
    written = [values.act(NUM_TOKENS, WIDTH) for _ in range(2 * NUM_LAYERS + 1)]
    learned = [values.act(2, WIDTH) for _ in range(2 * NUM_LAYERS + 1)]
    expected = _reads(default, impl, _double(written), _double(learned), has_backward)
    actual = _reads(target, impl, written, learned, has_backward)
    yield from differences(actual, expected, MIXER_FACTOR * TOLERANCE[dtype])


def _reads(
    cls: Any, impl: Impl, written: list[Tensor], learned: list[Tensor], has_backward: bool
) -> Results:
    from k3_core.config import K3Config
    from k3_core.ops import OpSet

    dtype, device = written[0].dtype, written[0].device
    # A block of two layers closes twice and leaves one layer over.
    text = dataclasses.replace(
        K3Config.preset("k3-test").text,
        attn_res_block_size=None if impl.implements == "residual" else 2,
        attn_res_type="full" if impl.implements == "full_attn_res" else "block",
    )
    table = {"kernel": "reference"} if dtype == torch.float64 else {}
    mixer = cls(text, OpSet.resolve(device.type, str(dtype).removeprefix("torch."), table))
    leaves = [x.detach().clone().requires_grad_(has_backward) for x in written]
    sites = [_site(pair) if mixer.has_sites else None for pair in learned]
    results: Results = {}
    with torch.set_grad_enabled(has_backward):
        state = mixer.start(leaves[0])
        for layer in range(NUM_LAYERS):
            for half, read in enumerate((mixer.read_attention, mixer.read_mlp)):
                place = 2 * layer + half
                results[f"read {place}"] = read(state, layer, sites[place])
                mixer.write(state, leaves[place + 1])
        results["output"] = mixer.read_output(state, sites[-1])
    if not has_backward:
        return results
    named = {f"write {number}": leaf for number, leaf in enumerate(leaves)}
    return {**results, **gradients(list(results.values()), named)}


def _site(pair: Tensor) -> Site:
    norm_D, query_D = pair
    norm = RMSNorm(WIDTH, 1e-5, device=pair.device, dtype=pair.dtype)
    proj = Linear(WIDTH, 1, device=pair.device, dtype=pair.dtype)
    with torch.no_grad():
        norm.weight.copy_(1.0 + 0.1 * norm_D)
        proj.weight.copy_(query_D[None] * WIDTH**-0.5)
    return Site(norm, proj)


def _double(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]
