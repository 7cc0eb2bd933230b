"""The tokens of a run: the token files of a folder, or a small corpus made on the spot.

A data folder holds token files in its sub-folders and the tokenizer's files beside them, as
`k3 train data build` writes it (training 4).
"""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from k3_core.config import ConfigError, VisionConfig
from k3_core.tokenizer import K3Tokenizer
from k3_train.config import TrainConfig
from k3_train.data.sampler import PackedSampler
from k3_train.data.token_file import MANIFEST, TokenFile, token_files
from k3_train.loop.curriculum import Curriculum, CurriculumSampler

CONFIG_FILE = "tokenizer_config.json"
NUM_SPECIAL = 256
DEFAULT_FILES = 150
"""Files of the standard library in the corpus that a run without data makes, about 3 MB."""
DEFAULT_CHAT_TOKENS = 200_000


def open_sampler(config: TrainConfig, folder: Path) -> CurriculumSampler:
    """Batches from every token file of `folder`, by the weights of the stage or by their sizes."""
    files = token_files(folder)
    if not files:
        raise ConfigError(
            "data.path", f"{folder} holds no token file", "Build one with `k3 train data build`."
        )
    sizes = {name: float(file.num_tokens) for name, file in files.items()}
    curriculum = Curriculum(config)
    mixtures = [span.weights or sizes for span in curriculum.spans]
    for weights in mixtures:
        _check_weights(weights, files, folder)
    # One order of the files for all stages: it is part of the seeds of their streams.
    names = list(dict.fromkeys(name for weights in mixtures for name in weights))
    samplers: list[PackedSampler] = []
    starts = [0] * len(names)
    for span, weights in zip(curriculum.spans, mixtures, strict=True):
        sampler = PackedSampler(
            [files[name] for name in names],
            [weights.get(name, 0.0) for name in names],
            span.tokens_per_batch,
            span.max_seq_len,
            config.run.seed,
            num_micro=span.accumulation,
            grain=curriculum.grain,
            starts=starts,
            long_tokens=config.data.long_tokens,
            long_repeats=config.data.long_repeats,
        )
        samplers.append(sampler)
        starts = sampler.offsets(span.num_steps)
    return CurriculumSampler(curriculum, samplers)


def open_tokenizer(folder: Path, vocab_size: int) -> K3Tokenizer:
    """The tokenizer of a data folder; ConfigError when the model has another vocabulary."""
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            "data.path", f"{folder} holds no tokenizer", "Build it with `k3 train data build`."
        )
    tokenizer = K3Tokenizer.from_pretrained(folder)
    if tokenizer.vocab_size != vocab_size:
        raise ConfigError(
            "data.path",
            f"the tokenizer of {folder} has {tokenizer.vocab_size} ids, the model {vocab_size}",
            "Build the data with the base tokens of the model (its ids less 256).",
        )
    return tokenizer


def check_pictures(sampler: CurriculumSampler, vision: VisionConfig | None) -> None:
    """ConfigError when the data has pictures that the model's vision tower cannot read."""
    if not sampler.has_images:
        return
    if vision is None:
        raise ConfigError(
            "data.path",
            "its batches have pictures, the model has no vision tower",
            "Choose a model with one, such as k3-test-vision, or give these files no weight.",
        )
    described = [file.manifest.get("images", {}) for file in sampler.samplers[0].files]
    if sizes := {one["patch_size"] for one in described if one} - {vision.patch_size}:
        raise ConfigError(
            "data.path",
            f"its patches have sides of {sorted(sizes)} pixels, the model's of {vision.patch_size}",
            "Train a model with a vision_config.patch_size that fits.",
        )


def build_default(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer of `vocab_size` ids and small token files, as `k3 train data build` does.

    Does nothing when that was done before.
    """
    last = folder / "stdlib"
    if (last / MANIFEST).is_file():
        return
    # Imported here: the tokenizer trainer is not installed where prepared data is trained on.
    from k3_train.data.corpus import build_chat, build_stdlib
    from k3_train.data.tokenizer_trainer import train_ranks

    files = _some_files()
    ranks = train_ranks((text for _, text in files), vocab_size - NUM_SPECIAL)
    tokenizer = K3Tokenizer(ranks, vocab_size - NUM_SPECIAL)
    tokenizer.save_pretrained(folder)
    build_chat(folder / "chat", tokenizer, DEFAULT_CHAT_TOKENS)
    build_stdlib(last, tokenizer, files)


def _some_files() -> list[tuple[str, str]]:
    from k3_core.evaluate import stdlib

    # A stride, because neighbours in the order of the paths are alike.
    return list(islice(stdlib.training_files(), 0, DEFAULT_FILES * 10, 10))


def _check_weights(
    weights: Mapping[str, float], files: Mapping[str, TokenFile], folder: Path
) -> None:
    unknown = sorted(set(weights) - set(files))
    if unknown:
        raise ConfigError(
            "data.weights",
            f"{unknown} are not among the token files of {folder}: {sorted(files)}",
            "Name token files.",
        )
