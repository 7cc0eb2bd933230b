"""The battery of attention and feed-forward layers: same weights, same tokens as the default's.

The expected side is the `<name>.default` layer in float64 on the reference ops, forward as one
packed batch without a cache. T packed tokens, D model width.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from k3_core.plugins import Impl, resolve
from k3_core.testing.compare import Results, differences, gradients
from k3_core.testing.tolerance import TOLERANCE
from k3_core.testing.values import Values

LAYER_CASES = {"attention": ("packed", "cached"), "moe": ("packed",)}
LENGTHS = (9, 1, 38)
NUM_DECODED = 2
# A layer is a chain of some ten roundings of its activations.
LAYER_FACTOR = 4.0


def compare_layer(
    target: Any, impl: Impl, case: str, dtype: torch.dtype, device: str
) -> Iterator[str]:
    """One line for each output or gradient of the layer that is off."""
    layer = _build(target, impl.implements, device, dtype, {})
    default = resolve(impl.kind, impl.implements, name="default", dtype="float64").load()
    exact = _build(default, impl.implements, device, torch.float64, {"kernel": "reference"})
    _fill(layer)
    if layer.state_dict().keys() != exact.state_dict().keys():
        yield f"parameters {sorted(layer.state_dict())} are not {sorted(exact.state_dict())}"
        return
    exact.load_state_dict(layer.state_dict())
    x_TD = Values(dtype, device, seed=1).act(sum(LENGTHS), _config().hidden_size)
    has_backward = case == "packed" and "backward" in impl.features
    run = _packed if case == "packed" else _cached
    actual = run(layer, x_TD, has_backward)
    expected = _packed(exact, x_TD.double(), has_backward)
    yield from differences(actual, expected, LAYER_FACTOR * TOLERANCE[dtype])


def _config() -> Any:
    from k3_core.config import K3Config

    return K3Config.preset("k3-test").text


def _build(
    cls: Any, implements: str, device: str, dtype: torch.dtype, overrides: dict[str, str]
) -> nn.Module:
    from k3_core.ops import OpSet

    config = _config()
    is_right = {
        "kda": config.is_kda_layer,
        "gated_mla": lambda i: not config.is_kda_layer(i),
        "latent_moe": config.is_moe_layer,
        "dense_mlp": lambda i: not config.is_moe_layer(i),
    }[implements]
    layer = next(i for i in range(config.num_hidden_layers) if is_right(i))
    ops = OpSet.resolve(device, str(dtype).removeprefix("torch."), overrides)
    built: nn.Module = cls(config, layer, ops, device=device, dtype=dtype)
    if dtype == torch.float64:
        # The parameters that stay in full precision are float32 otherwise.
        built.double()
    return built


def _fill(layer: nn.Module) -> None:
    """Values of a sensible size for every parameter, norm weights around one."""
    values = Values(torch.float64, "cpu")
    with torch.no_grad():
        for name, parameter in sorted(layer.named_parameters()):
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 25
            draw = values.full(*parameter.shape, scale=fan_in**-0.5)
            parameter.copy_(draw + 1.0 if "norm" in name else draw)


def _packed(layer: nn.Module, x_TD: Tensor, has_backward: bool) -> Results:
    from k3_core.model.batch import SequenceBatch

    batch = SequenceBatch.from_lengths(LENGTHS, device=x_TD.device)
    x_TD = x_TD.detach().clone().requires_grad_(has_backward)
    with torch.set_grad_enabled(has_backward):
        output = layer(x_TD, batch)
    # A feed-forward returns its routes too.
    y_TD = output[0] if isinstance(output, tuple) else output
    if not has_backward:
        return {"result": y_TD}
    trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    return {"result": y_TD, **gradients([y_TD], {"the input": x_TD, **trained})}


@torch.no_grad()
def _cached(layer: Any, x_TD: Tensor, has_backward: bool) -> Results:
    """The same tokens through a cache: a prefill without the last tokens, then one at a time."""
    from k3_core.cache.contiguous import ContiguousCache
    from k3_core.model.batch import SequenceBatch

    specs = {layer.layer: layer.cache_spec()}
    cache = ContiguousCache(specs, len(LENGTHS), device=x_TD.device, dtype=x_TD.dtype)
    first = [max(length - NUM_DECODED, 0) for length in LENGTHS]
    outputs: list[list[Tensor]] = [[] for _ in LENGTHS]
    done = [0] * len(LENGTHS)
    whole = x_TD.split(LENGTHS)
    for lengths in (first, *([1] * len(LENGTHS) for _ in range(NUM_DECODED))):
        step = [min(n, total - d) for n, total, d in zip(lengths, LENGTHS, done, strict=True)]
        slots = [slot for slot, count in enumerate(step) if count]
        batch = SequenceBatch.from_lengths(
            [step[s] for s in slots], device=x_TD.device, cache=cache, slots=slots
        )
        tokens = torch.cat([whole[s][done[s] : done[s] + step[s]] for s in slots])
        parts = layer(tokens, batch).split(batch.seqlens)
        cache.advance(batch.slots, batch.seqlens)
        for slot, part in zip(slots, parts, strict=True):
            outputs[slot].append(part)
            done[slot] += step[slot]
    return {"result": torch.cat([torch.cat(parts) for parts in outputs])}
