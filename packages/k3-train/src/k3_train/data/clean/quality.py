"""A small quality classifier: logistic regression over hashed words and word pairs.

Trained from examples of what to keep and what to drop; any callable from text to a score does as
well (`k3_train.data.clean.pipeline.Quality`), and plugins register theirs as `quality_classifier`.
"""

import re
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from k3_core.errors import K3Error

NUM_FEATURES = 1 << 18
WORD = re.compile(r"\w+|[^\w\s]")
EPOCHS = 5
RATE = 1.0
BIAS = 0.01
"""Rate of the bias over that of the weights, which see inputs of norm 1."""
MAX_CHARS = 20_000
"""Of a document that are looked at."""


class HashedLinear:
    """`score = sigmoid(w . x + b)`, x the L2-normalised presence of hashed words and pairs."""

    def __init__(self, weights: npt.NDArray[np.float32], bias: float) -> None:
        self.weights, self.bias = weights, bias

    def __call__(self, text: str) -> float:
        """Score between 0 and 1; above 0.5 the text is more like the good examples."""
        found = features(text)
        value = self.bias + float(self.weights[found].sum()) / max(len(found), 1) ** 0.5
        return float(1 / (1 + np.exp(-np.clip(value, -50, 50))))

    @classmethod
    def train(cls, good: Sequence[str], bad: Sequence[str], *, seed: int = 0) -> "HashedLinear":
        """Fit by gradient descent, both classes weighing the same. K3Error when a class is empty.

        All features have one rate: a word that is in many examples learns more than a rare one.
        """
        if not good or not bad:
            raise K3Error(f"{len(good)} good and {len(bad)} bad examples: give some of each")
        rows = [(features(text), 1.0) for text in good] + [(features(text), 0.0) for text in bad]
        weight = {1.0: len(rows) / len(good) / 2, 0.0: len(rows) / len(bad) / 2}
        model = cls(np.zeros(NUM_FEATURES, np.float32), 0.0)
        rng = np.random.default_rng(seed)
        for _ in range(EPOCHS):
            for index in rng.permutation(len(rows)):
                found, target = rows[index]
                scale = max(len(found), 1) ** -0.5
                value = model.bias + float(model.weights[found].sum()) * scale
                error = weight[target] * (1 / (1 + np.exp(-np.clip(value, -50, 50))) - target)
                model.weights[found] -= RATE * error * scale
                model.bias -= RATE * error * BIAS
        return model

    def save(self, path: Path) -> None:
        """Write one safetensors file."""
        tensors: dict[str, npt.NDArray[Any]] = {
            "weights": self.weights,
            "bias": np.array([self.bias]),
        }
        save_file(tensors, path, metadata={"format": "k3-hashed-linear/1"})

    @classmethod
    def load(cls, path: Path) -> "HashedLinear":
        """Read what `save` wrote; K3Error for another file."""
        try:
            tensors = load_file(path)
            return cls(tensors["weights"], float(tensors["bias"][0]))
        except (OSError, SafetensorError, KeyError) as error:
            raise K3Error(
                f"{path} is no quality classifier ({error}): train one with `k3 train data quality`"
            ) from error


def holdout_accuracy(good: Sequence[str], bad: Sequence[str], *, seed: int = 0) -> float:
    """Mean share of both classes that a model of the other four fifths has right."""
    rng = np.random.default_rng(seed)
    kept, held = [], []
    for texts in (good, bad):
        order = rng.permutation(len(texts))
        cut = max(1, len(texts) // 5)
        held.append([texts[i] for i in order[:cut]])
        kept.append([texts[i] for i in order[cut:]])
    model = HashedLinear.train(kept[0], kept[1], seed=seed)
    right = [np.mean([model(text) > 0.5 for text in held[0]])]
    right.append(np.mean([model(text) <= 0.5 for text in held[1]]))
    return float(np.mean(right))


def features(text: str) -> npt.NDArray[np.int64]:
    """Sorted feature numbers of a text: its words and neighbouring pairs, in lower case."""
    words = WORD.findall(text[:MAX_CHARS].lower())
    found = {zlib.crc32(word.encode()) % NUM_FEATURES for word in words}
    pairs = pairwise(words)
    found |= {zlib.crc32(f"{a} {b}".encode()) % NUM_FEATURES for a, b in pairs}
    return np.array(sorted(found), np.int64)
