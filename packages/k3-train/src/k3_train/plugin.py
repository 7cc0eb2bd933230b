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
def k3_register_dataset() -> Iterable[Impl]:
    """Sources of documents: what machines have, local files, generated ones."""
    return [
        _impl("dataset", name, f"data.sources.{target}", summary)
        for name, target, summary in (
            ("stdlib", "python_files:StdlibSource", "the standard library's training files"),
            ("packages", "python_files:PackagesSource", "Python files of installed distributions"),
            ("debian", "debian:DebianSource", "texts of installed Debian packages"),
            ("local", "local:LocalSource", "JSONL, Parquet and text files"),
            ("chat", "generated:ChatSource", "generated conversations, without end"),
            ("long_context", "long:LongContextSource", "questions over long texts, without end"),
            (
                "long_documents",
                "long:LongDocumentsSource",
                "documents permuted, joined, asked about",
            ),
        )
    ]


@hookimpl
def k3_register_trainer_event() -> Iterable[Impl]:
    """Accounting of the sources."""
    target = "events.source_tokens:SourceTokens"
    return [
        _impl("trainer_event", "source_tokens", target, "tokens and epochs by source in the rows")
    ]


@hookimpl
def k3_register_quality_classifier() -> Iterable[Impl]:
    """A classifier that is trained here."""
    target = "data.clean.quality:HashedLinear.load"
    return [
        _impl("quality_classifier", "hashed_linear", target, "logistic regression, hashed words")
    ]


@hookimpl
def k3_add_commands(registry: CommandRegistry) -> None:
    """The command `k3 train`."""
    registry.add("train", target="k3_train.cli:app", help="Train a model, build its data.")
