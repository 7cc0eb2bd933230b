"""The model of a run or of one of its checkpoints, and writing it in the released layout."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from k3_core.config import ConfigError
from k3_core.model import K3ForConditionalGeneration
from k3_core.tokenizer import K3Tokenizer
from k3_train.config import TrainConfig, load_train_config
from k3_train.loop import checkpoint
from k3_train.loop.build import model_config
from k3_train.loop.corpus import open_tokenizer
from k3_train.loop.session import CONFIG_FILE, save_model

_MODEL = "model."


@dataclass(frozen=True)
class Trained:
    """A model as a checkpoint has it, in float32. run, checkpoint: the folders."""

    model: K3ForConditionalGeneration
    tokenizer: K3Tokenizer
    config: TrainConfig
    step: int
    run: Path
    checkpoint: Path


def export(source: Path, out: Path, *, data: Path | None = None) -> int:
    """Write the model of a run (its newest checkpoint) or of a checkpoint folder; returns its step.

    data: folder of the tokenizer, where the run's has moved. Experts are packed when the
    configuration says that they are quantised. ConfigError, CheckpointError name what is missing.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError("--out", f"{out} is not empty", "Choose another folder.")
    found = open_run(source, data=data)
    save_model(found.model.eval(), out, found.tokenizer)
    return found.step


def open_run(
    source: Path, *, device: torch.device | str = "cpu", data: Path | None = None
) -> Trained:
    """The model of a run (its newest checkpoint) or of a checkpoint folder.

    data: folder of the tokenizer, where the run's has moved. ConfigError, CheckpointError name
    what is missing.
    """
    run, folder = _locate(source)
    config = load_train_config(file=run / CONFIG_FILE)
    tensors, meta = checkpoint.load(folder)
    settings = model_config(config.model)
    tokenizer = open_tokenizer(
        data or Path(config.data.path or run / "data"), settings.text.vocab_size
    )
    model = K3ForConditionalGeneration(settings, device=device, initialize=False)
    _copy(tensors, model, folder)
    return Trained(model, tokenizer, config, int(meta["step"]), run, folder)


def is_of_run(source: Path) -> bool:
    """Whether a folder is a run or a checkpoint of one."""
    return any((folder / CONFIG_FILE).is_file() for folder in (source, _run_of(source)))


@torch.no_grad()
def _copy(tensors: Mapping[str, Tensor], model: K3ForConditionalGeneration, folder: Path) -> None:
    # By the names of the parameters, which a state dict has not: it names every expert alone.
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in own.items():
        saved = tensors.get(_MODEL + name)
        if saved is None or saved.shape != tensor.shape:
            raise checkpoint.CheckpointError(
                f"{folder} does not fit the model of its run: {name} is absent or of another shape"
            )
        tensor.copy_(saved)


def _locate(source: Path) -> tuple[Path, Path]:
    """The run's folder and that of the checkpoint."""
    if (source / CONFIG_FILE).is_file():
        return source, checkpoint.newest(source / "checkpoints")
    if is_of_run(source):
        return _run_of(source), source
    raise ConfigError(
        str(source),
        f"neither a run, which has a {CONFIG_FILE}, nor RUN/checkpoints/step-N",
        "Give one of them.",
    )


def _run_of(folder: Path) -> Path:
    """The run that a checkpoint's folder is in, if it is one."""
    return folder.resolve().parent.parent
