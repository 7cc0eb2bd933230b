"""The cleaning on 5,000 documents whose labels it does not see, made by `planted.py`."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from k3_train.data.clean.pipeline import Cleaner
from k3_train.data.documents import Document

TOTAL = 5000


def load_planted() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "planted", Path(__file__).parents[2] / "planted.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def judged() -> tuple[list[Any], list[str | None], dict[str, Any]]:
    """The planted documents, the rule that each broke, and the report."""
    corpus = load_planted().planted_corpus(TOTAL, seed=6)
    assert len(corpus) == TOTAL
    cleaner = Cleaner()
    verdicts = cleaner.judge(Document(one.name, one.data) for one in corpus)
    return corpus, [reason for _, reason in verdicts], cleaner.report


@pytest.mark.parametrize(
    "label, precision, recall",
    [
        ("exact_duplicate", 1.0, 1.0),
        ("near_duplicate", 0.98, 0.95),
        ("binary", 0.98, 0.98),
        ("truncated", 0.98, 0.98),
        ("log", 0.98, 0.98),
    ],
)
def test_planted_documents_are_found(
    judged: tuple[list[Any], list[str | None], Any], label: str, precision: float, recall: float
) -> None:
    corpus, verdicts, _ = judged
    planted = {one.name for one in corpus if one.label == label}
    found = {one.name for one, reason in zip(corpus, verdicts, strict=True) if reason == label}
    assert len(planted) >= 250
    right = len(planted & found)
    assert right >= precision * len(found), sorted(found - planted)[:10]
    assert right >= recall * len(planted), sorted(planted - found)[:10]


def test_what_is_clean_stays(judged: tuple[list[Any], list[str | None], Any]) -> None:
    corpus, verdicts, _ = judged
    clean = [reason for one, reason in zip(corpus, verdicts, strict=True) if one.label == "clean"]
    assert len(clean) > 3000
    assert clean.count(None) >= 0.98 * len(clean)


def test_every_document_is_counted_once(
    judged: tuple[list[Any], list[str | None], dict[str, Any]],
) -> None:
    corpus, verdicts, report = judged
    kept = [one for one, reason in zip(corpus, verdicts, strict=True) if reason is None]
    assert report["read"] == TOTAL == report["kept"] + sum(report["dropped"].values())
    assert (report["kept"], report["kept_bytes"]) == (len(kept), sum(len(k.data) for k in kept))
    assert report["dropped"] == {r: verdicts.count(r) for r in set(verdicts) if r is not None}
