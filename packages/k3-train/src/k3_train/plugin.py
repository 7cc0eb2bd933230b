"""What k3-train declares to the registry; imports no torch. Source: design 3."""

from collections.abc import Iterable

from k3_core.cli.lazy import CommandRegistry
from k3_core.plugins import Impl, hookimpl


def _impl(kind: str, implements: str, target: str, summary: str) -> Impl:
    return Impl(
        kind=kind,
        name=f"{implements}.default",
        implements=implements,
        target=f"k3_train.{target}",
        summary=summary,
    )


@hookimpl
def k3_register_optimizer() -> Iterable[Impl]:
    """Per-Head Muon with AdamW by role, and AdamW alone."""
    return [
        _impl(
            "optimizer", "per_head_muon", "optim.build:per_head_muon", "Muon by head, AdamW rest"
        ),
        _impl("optimizer", "adamw", "optim.build:adamw", "AdamW for every parameter"),
    ]


@hookimpl
def k3_register_balancer() -> Iterable[Impl]:
    """Quantile Balancing, exact and by histogram, and none."""
    return [
        _impl(
            "balancer",
            "quantile_exact",
            "balance.quantile_exact:ExactQuantileBalancer",
            "Quantile Balancing, exact quantile",
        ),
        _impl(
            "balancer",
            "quantile_histogram",
            "balance.quantile_histogram:HistogramQuantileBalancer",
            "Quantile Balancing, histogram estimator",
        ),
        _impl("balancer", "none", "balance.none:NoBalancer", "biases stay as they are"),
    ]


@hookimpl
def k3_register_schedule() -> Iterable[Impl]:
    """Cosine with linear warm-up."""
    return [_impl("schedule", "cosine", "optim.cosine:CosineSchedule", "warm-up, cosine, floor")]


@hookimpl
def k3_register_memory_policy() -> Iterable[Impl]:
    """What becomes of saved activations: kept, made again, rounded, moved to the host."""
    return [
        _impl("memory_policy", "keep", "memory.base:Keep", "saved as they are"),
        _impl("memory_policy", "recompute", "memory.recompute:Recompute", "run again in backward"),
        _impl("memory_policy", "fp8", "memory.fp8:FP8", "E4M3 in blocks of 128 values"),
        _impl("memory_policy", "offload", "memory.offload:Offload", "host memory, with prefetch"),
    ]


@hookimpl
def k3_add_commands(registry: CommandRegistry) -> None:
    """The command `k3 train`."""
    registry.add("train", target="k3_train.cli:app", help="Train a model, build its data.")
