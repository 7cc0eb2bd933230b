"""The model that is measured: a folder, a bundled model, a run or one of its checkpoints."""

from pathlib import Path

from k3_core.checkpoint.source import resolve_source
from k3_core.config import ConfigError
from k3_core.engine.load import load_model
from k3_train.evaluate.base import Subject
from k3_train.evaluate.digest import files_digest
from k3_train.loop.build import choose_device
from k3_train.loop.curriculum import Curriculum
from k3_train.tools.export import is_of_run, open_run


def open_subject(
    source: str, *, device: str = "auto", dtype: str = "float32", data: Path | None = None
) -> Subject:
    """Load `source` for measuring; a run stands for its newest checkpoint, in float32.

    data: folder of the tokenizer, where a run's has moved. K3Error when there is no such model.
    """
    folder = Path(source)
    place = choose_device(device)
    if not is_of_run(folder):
        # Decoded experts give the same numbers as packed ones and are faster in large batches.
        model, tokenizer = load_model(source, device=str(place), dtype=dtype, experts="dequantized")
        return Subject(model.eval(), tokenizer, source, files_digest(resolve_source(source)))
    if dtype not in ("float32", "auto"):
        raise ConfigError(
            "--dtype", f"{dtype!r}, but a checkpoint is float32", "Export it to measure another."
        )
    found = open_run(folder, device=place, data=data)
    return Subject(
        found.model.eval(),
        found.tokenizer,
        f"{found.run.resolve().name}/{found.checkpoint.name}",
        files_digest(found.checkpoint),
        Curriculum(found.config).grain,
    )
