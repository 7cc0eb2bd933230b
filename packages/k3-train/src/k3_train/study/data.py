"""The corpus of a study: the standard library and recall tasks, with parts that are held out.

`train/` is a data folder as any run has; `heldout/` has token files of the same names.
"""

import json
from itertools import islice
from pathlib import Path

from k3_core.errors import K3Error
from k3_core.evaluate import stdlib
from k3_core.evaluate.text import heldout_texts
from k3_core.tokenizer import K3Tokenizer
from k3_train.data.corpus import build_stdlib
from k3_train.data.token_file import TokenFile, token_files
from k3_train.data.tokenizer_trainer import train_ranks
from k3_train.loop.corpus import NUM_SPECIAL
from k3_train.study.declare import Scale
from k3_train.study.recall import build_recall
from k3_train.study.settings import data_key

TRAIN, HELDOUT = "train", "heldout"
_MADE = "made.json"
HELDOUT_BYTES = 400_000
STRIDE = 10
"""Of the paths of the standard library, so that a few files are not neighbours."""


def build_data(folder: Path, scale: Scale) -> None:
    """Write the corpus of a scale, or find it there; K3Error when another one is there."""
    made = folder / _MADE
    key = data_key(scale)
    if made.is_file():
        found = json.loads(made.read_text())
        if found != key:
            raise K3Error(f"{folder} holds a corpus for {found}, not {key}: give another --work")
        return
    files = _files(scale.corpus_files)
    num_base = scale.vocab_size - NUM_SPECIAL
    tokenizer = K3Tokenizer(train_ranks((text for _, text in files), num_base), num_base)
    (folder / TRAIN).mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder / TRAIN)
    text = build_stdlib(folder / TRAIN / "stdlib", tokenizer, files)
    held = [(str(index), part) for index, part in enumerate(heldout_texts(HELDOUT_BYTES))]
    build_stdlib(folder / HELDOUT / "stdlib", tokenizer, held)
    if scale.recall_share:
        share = scale.recall_share / (1 - scale.recall_share)
        needed = {TRAIN: int(share * text.num_tokens), HELDOUT: scale.eval_tokens}
        for seed, (part, num_tokens) in enumerate(needed.items()):
            build_recall(
                folder / part / "recall",
                num_pairs=scale.recall_pairs,
                num_tokens=num_tokens,
                vocab_size=scale.vocab_size,
                bos=tokenizer.bos_id,
                seed=seed,
            )
    made.write_text(json.dumps(key))


def heldout_files(folder: Path) -> dict[str, TokenFile]:
    """The held-out token files by name; K3Error when there is none."""
    files = token_files(folder / HELDOUT)
    if not files:
        raise K3Error(f"{folder}/{HELDOUT} holds no token file: a study measures on held-out text")
    return files


def _files(count: int) -> list[tuple[str, str]]:
    if not count:
        return list(stdlib.training_files())
    return list(islice(stdlib.training_files(), 0, count * STRIDE, STRIDE))
