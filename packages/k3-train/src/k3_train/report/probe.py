"""One forward pass that is looked into from outside: the model's code does not know of it.

AttnRes weights, KDA decays and states are not outputs of the model. For the length of a probe its
ops `attn_res` and `kda_chunk` are replaced by ones that also note what they were given.

T tokens, D model width, H heads, K key channels, V value channels, N sequences, S sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from k3_core.ops import OP_NAMES, OpSet
from k3_core.ops.kda_chunk.inputs import log_decay
from k3_core.ops.math import rms_scale
from k3_train.packed import packed
from k3_train.precision import training_precision

if TYPE_CHECKING:
    from k3_core.model import K3ForConditionalGeneration
    from k3_train.data.sampler import Batch

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_SITE = re.compile(r"(?:layers\.(\d+)\.)?(self_attention|mlp|output_attn)_res_norm\.weight$")
_PLACES = {"self_attention": "attn", "mlp": "mlp", "output_attn": "output"}


@dataclass
class Probe:
    """What one pass showed.

    depth: mean weight of each source, by site (`3.attn`, `3.mlp`, `output`), in order of depth.
    memory: for each KDA layer, quantiles [H, Q] of -1 / log decay over tokens and channels: the
    number of tokens after which a channel has forgotten all but 1/e.
    state_norm: for each KDA layer, Frobenius norm [H] of the final states, mean over sequences.
    out_rms, out_max: root mean square and largest magnitude of each sublayer's output, by `attn`
    and `mlp`, in order of layers.
    """

    depth: dict[str, Tensor] = field(default_factory=dict)
    memory: dict[int, Tensor] = field(default_factory=dict)
    state_norm: dict[int, Tensor] = field(default_factory=dict)
    out_rms: dict[str, Tensor] = field(default_factory=dict)
    out_max: dict[str, Tensor] = field(default_factory=dict)


def probe(model: K3ForConditionalGeneration, batch: Batch) -> Probe:
    """Look into one pass over the tokens of `batch`; balancers do not see it.

    Runs in the precision of training and, with gradients on, by the ops of training: those of
    inference would be compiled for it alone. Results stay on the model's device.
    """
    result, was_training = Probe(), model.training
    model.eval()
    try:
        precision = training_precision(model.device)
        with _watched(model, result), torch.enable_grad(), precision:
            out = model.forward_packed(
                batch.input_ids.to(model.device),
                packed(batch, model.device),
                output_hidden_states=True,
                output_logits=False,
            )
    finally:
        model.train(was_training)
    assert out.hidden_states is not None
    num_layers = model.config.text.num_hidden_layers
    for place in ("attn", "mlp"):
        outputs = [
            out.hidden_states[f"layers.{i}.{place}_out"].detach().float() for i in range(num_layers)
        ]
        result.out_rms[place] = torch.stack([x_TD.square().mean().sqrt() for x_TD in outputs])
        result.out_max[place] = torch.stack([x_TD.abs().max() for x_TD in outputs])
    return result


@contextmanager
def _watched(model: nn.Module, result: Probe) -> Iterator[None]:
    """Ops of the mixer and of the KDA layers that note what passes, until the end of the block."""
    holders: list[tuple[Any, dict[str, Callable[..., Any]]]] = []
    mixer: Any = model.language_model.model.mixer  # type: ignore[union-attr]
    if hasattr(mixer, "ops"):
        holders.append((mixer, {"attn_res": _depth_watcher(model, mixer.ops.attn_res, result)}))
    for layer in model.modules():
        if hasattr(layer, "A_log") and hasattr(layer, "ops"):
            holders.append((layer, {"kda_chunk": _kda_watcher(layer, result)}))
    kept = [(holder, holder.ops) for holder, _ in holders]
    try:
        for holder, functions in holders:
            holder.ops = with_ops(holder.ops, **functions)
        yield
    finally:
        for holder, ops in kept:
            holder.ops = ops


def with_ops(ops: OpSet, **functions: Callable[..., Any]) -> OpSet:
    """A copy of an op set with some of its callables replaced."""
    return OpSet({**{name: getattr(ops, name) for name in OP_NAMES}, **functions}, ops.resolutions)


def _depth_watcher(model: nn.Module, op: Callable[..., Tensor], result: Probe) -> Any:
    sites = {}
    for name, param in model.named_parameters():
        if match := _SITE.search(name):
            sites[id(param)] = ".".join(filter(None, (match[1], _PLACES[match[2]])))

    def attn_res(values: Any, norm_D: Tensor, proj_1D: Tensor, *, eps: float) -> Tensor:
        with torch.no_grad():
            query_D = norm_D.float() * proj_1D.float().reshape(-1)
            scores = [(x.float() @ query_D) * rms_scale(x.float(), eps)[..., 0] for x in values]
            result.depth[sites[id(norm_D)]] = torch.stack(scores, -1).softmax(-1).mean(0)
        return op(values, norm_D, proj_1D, eps=eps)

    return attn_res


def _kda_watcher(layer: Any, result: Probe) -> Any:
    op = layer.ops.kda_chunk

    def kda_chunk(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        o_THV, final_NHVK = op(*args, **{**options, "output_final_state": True})
        gate_THK, _, A_log_H, dt_bias_HK = args[3:7]
        with torch.no_grad():
            g_THK = log_decay(gate_THK.float(), A_log_H, dt_bias_HK, options["lower_bound"])
            tokens_HX = (-1 / g_THK.double()).transpose(0, 1).flatten(1)
            at_Q = tokens_HX.new_tensor(QUANTILES)
            result.memory[layer.layer] = torch.quantile(tokens_HX, at_Q, dim=1).T
            result.state_norm[layer.layer] = final_NHVK.flatten(2).norm(dim=-1).mean(0)
        return o_THV, final_NHVK if options.get("output_final_state") else None

    return kda_chunk
