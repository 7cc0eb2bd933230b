"""Parameter and byte counts of a configuration (architecture 11), from its manifest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .manifest import TensorSpec, tensor_manifest
from .model import K3Config


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters and stored bytes.

    active: text parameters one token passes through, with the unembedding, without the input
    embedding, MTP layers and vision. active_without_head leaves out the unembedding too.
    """

    total: int
    active: int
    active_without_head: int
    text: int
    routed_experts: int
    mtp: int
    vision_tower: int
    projector: int
    num_tensors: int
    num_bytes: int


def count_parameters(
    config: K3Config, specs: Iterable[TensorSpec] | None = None
) -> ParameterCounts:
    """Count the parameters of `config`; `specs` may give its manifest when already at hand."""
    sums = dict.fromkeys(("text", "routed", "mtp", "embed", "head", "tower", "projector"), 0)
    num_tensors = num_bytes = 0
    mtp_layers = range(
        config.text.num_hidden_layers,
        config.text.num_hidden_layers + config.text.num_nextn_predict_layers,
    )
    mtp_marks = tuple(f"model.layers.{index}." for index in mtp_layers)
    for spec in tensor_manifest(config) if specs is None else specs:
        num_tensors += 1
        num_bytes += spec.num_bytes
        sums[_part(spec.name, mtp_marks)] += _real_parameters(spec, config)
    backbone = sums["text"] + sums["head"]
    active_experts = sums["routed"] * config.text.num_experts_per_token // config.text.num_experts
    return ParameterCounts(
        total=sum(sums.values()),
        active=backbone + active_experts,
        active_without_head=sums["text"] + active_experts,
        text=backbone + sums["embed"] + sums["routed"] + sums["mtp"],
        routed_experts=sums["routed"],
        mtp=sums["mtp"],
        vision_tower=sums["tower"],
        projector=sums["projector"],
        num_tensors=num_tensors,
        num_bytes=num_bytes,
    )


def _real_parameters(spec: TensorSpec, config: K3Config) -> int:
    """Parameters without the zero tail of A_log."""
    if spec.name.endswith(".A_log"):
        return config.text.linear_attn_config.num_heads
    return spec.num_parameters


def _part(name: str, mtp_marks: tuple[str, ...]) -> str:
    if name.startswith("vision_tower."):
        return "tower"
    if name.startswith("mm_projector."):
        return "projector"
    inner = name.removeprefix("language_model.")
    if inner.startswith(mtp_marks):
        return "mtp"
    if inner == "model.embed_tokens.weight":
        return "embed"
    if inner == "lm_head.weight":
        return "head"
    return "routed" if ".block_sparse_moe.experts." in inner else "text"
