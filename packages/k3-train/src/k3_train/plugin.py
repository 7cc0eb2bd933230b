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
    """Per-Head Muon and whole-matrix Muon with AdamW by role, and AdamW alone."""
    return [
        _impl(
            "optimizer", "per_head_muon", "optim.build:per_head_muon", "Muon by head, AdamW rest"
        ),
        _impl("optimizer", "muon", "optim.build:muon", "Muon by whole matrices, AdamW rest"),
        _impl("optimizer", "adamw", "optim.build:adamw", "AdamW for every parameter"),
    ]


@hookimpl
def k3_register_balancer() -> Iterable[Impl]:
    """Quantile Balancing, exact and by histogram; the sign rule, the auxiliary loss, and none."""
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
        _impl(
            "balancer", "sign", "balance.sign:SignBalancer", "biases by the sign of the excess load"
        ),
        _impl(
            "balancer",
            "auxiliary",
            "balance.auxiliary:AuxiliaryBalancer",
            "a loss on the router's scores",
        ),
        _impl("balancer", "none", "balance.none:NoBalancer", "biases stay as they are"),
    ]


@hookimpl
def k3_register_schedule() -> Iterable[Impl]:
    """Cosine, WSD and constant, each with linear warm-up."""
    return [
        _impl("schedule", "cosine", "optim.cosine:CosineSchedule", "warm-up, cosine, floor"),
        _impl("schedule", "wsd", "optim.wsd:WSDSchedule", "warm-up, plateau, line to a floor"),
        _impl("schedule", "constant", "optim.constant:ConstantSchedule", "warm-up, then the peak"),
    ]


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
            ("digits", "pictures:DigitsSource", "images and clips of digits, without end"),
            ("renders", "pictures:RendersSource", "pictures and the code that draws them"),
        )
    ]


@hookimpl
def k3_register_trainer_event() -> Iterable[Impl]:
    """Guard, QK-Clip, stages, diagnostics, evaluation, clamped SwiGLU, sources, towers' norms."""
    return [
        _impl("trainer_event", "guard", "events.guard:Guard", "bad steps named, skipped"),
        _impl("trainer_event", "qk_clip", "optim.qk_clip:QKClip", "keeps scores below tau"),
        _impl("trainer_event", "stages", "events.stages:Stages", "which stage the run is in"),
        _impl(
            "trainer_event",
            "diagnostics",
            "report.diagnostics:Diagnostics",
            "loads, biases, depth weights, decays, update norms by head",
        ),
        _impl(
            "trainer_event", "evaluate", "events.evaluate:Evaluate", "suites during the training"
        ),
        _impl(
            "trainer_event",
            "clamped_glu",
            "study.clamped_glu:ClampedGLU",
            "clamped SwiGLU in the place of SiTU-GLU",
        ),
        _impl(
            "trainer_event",
            "source_tokens",
            "events.source_tokens:SourceTokens",
            "tokens and epochs by source in the rows",
        ),
        _impl(
            "trainer_event",
            "tower_norms",
            "events.tower_norms:TowerNorms",
            "gradient norms of text, vision and projector",
        ),
    ]


@hookimpl
def k3_register_logger() -> Iterable[Impl]:
    """TensorBoard files, trackio and Weights & Biases; each is imported by a run that uses it."""
    return [
        _impl("logger", "tensorboard", "events.tensorboard:TensorBoard", "RUN/tensorboard"),
        _impl("logger", "trackio", "events.trackers:Trackio", "rows to trackio"),
        _impl("logger", "wandb", "events.trackers:Wandb", "rows to Weights & Biases"),
    ]


@hookimpl
def k3_register_suite() -> Iterable[Impl]:
    """What `k3 train evaluate` measures."""
    return [
        _impl("suite", name, f"evaluate.{target}", summary)
        for name, target, summary in (
            ("text", "text:TextSuite", "perplexity and bits a byte of documents"),
            ("tasks", "tasks:TasksSuite", "unseen questions in the chat format, by effort"),
            ("few_shot", "few_shot:FewShotSuite", "small tasks in plain text, after examples"),
            ("long_context", "long_context:LongContextSuite", "needle, keys, hops, registers"),
            ("lm_eval", "lm_eval_suite:LmEvalSuite", "tasks of lm-eval"),
        )
    ]


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
