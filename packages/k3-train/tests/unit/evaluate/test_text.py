"""Perplexity and bits a byte against a sum over tokens in float64."""

import json
import math
from dataclasses import replace

import pytest
import torch

from k3_core.config import ConfigError
from k3_core.errors import K3Error
from k3_train.evaluate.base import Wanted
from k3_train.evaluate.rows import open_suite

WINDOW, OVERLAP = 24, 7


@pytest.fixture
def sources(tmp_path):
    """Two sources, one of them with an empty document and characters of several bytes."""
    texts = {"plain": ["short", "a longer text. " * 5], "odd": ["", "naïve 漢字 😀 " * 3, "x"]}
    for name, documents in texts.items():
        lines = (json.dumps({"text": one}) + "\n" for one in documents)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    tables = {name: {"kind": "local", "path": str(tmp_path / f"{name}.jsonl")} for name in texts}
    return texts, tables


def nats_by_brute_force(subject, text):
    """Each token from the tokens before it in its window, one forward a token."""
    ids = [subject.tokenizer.bos_id, *subject.tokenizer.encode(text)]
    nats = 0.0
    for place in range(1, len(ids)):
        starts = range(0, len(ids), WINDOW - OVERLAP)
        first = next(start for start in starts if place <= start + WINDOW)
        logits = subject.model(input_ids=torch.tensor([ids[first:place]])).logits[0, -1]
        nats -= float(logits.detach().double().log_softmax(-1)[ids[place]])
    return nats


def measure(subject, tables, **options):
    suite = open_suite("text", {"sources": tables, "window": WINDOW, "overlap": OVERLAP, **options})
    return {(one.family, one.metric): one for one in suite.measure(subject, Wanted())}


def test_figures_are_those_of_an_independent_sum(subject, sources):
    texts, tables = sources
    found = measure(subject, tables)
    texts["all"] = [one for documents in list(texts.values()) for one in documents]
    expected = {one: nats_by_brute_force(subject, one) for one in texts["all"] if one}
    for name, documents in texts.items():
        documents = [one for one in documents if one]
        nats = sum(expected[one] for one in documents)
        num_bytes = sum(len(one.encode()) for one in documents)
        bits, perplexity = found[name, "bits_per_byte"], found[name, "perplexity"]
        assert bits.value == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-6)
        # The tokens of this tokenizer are bytes.
        assert perplexity.value == pytest.approx(math.exp(nats / num_bytes), rel=1e-6)
        assert bits.count == perplexity.count == len(documents)
        assert bits.conditions == {"tokens": num_bytes, "bytes": num_bytes}
        assert bits.low < bits.value < bits.high
        assert perplexity.low < perplexity.value < perplexity.high


def test_a_document_does_not_see_another(subject, sources, tmp_path):
    _, tables = sources
    both = measure(subject, tables)["plain", "bits_per_byte"]
    lines = (tmp_path / "plain.jsonl").read_text().splitlines()
    (tmp_path / "plain.jsonl").write_text(lines[1] + "\n" + lines[0] + "\n")
    swapped = measure(subject, tables)["plain", "bits_per_byte"]
    assert swapped.value == pytest.approx(both.value, rel=1e-6)
    alone = []
    for line in lines:
        (tmp_path / "plain.jsonl").write_text(line + "\n")
        alone.append(measure(subject, tables)["plain", "bits_per_byte"])
    assert [one.low for one in alone] == [None, None]
    bits = sum(one.value * one.conditions["bytes"] for one in alone)
    assert both.value * both.conditions["bytes"] == pytest.approx(bits, rel=1e-6)


def test_the_limit_is_of_each_source_and_the_window_that_of_the_context(subject, sources):
    _, tables = sources
    suite = open_suite("text", {"sources": tables})
    counts = {
        one.family: one.count for one in suite.measure(subject, Wanted(limit=2))
    }  # of the odd source, the first is empty
    assert counts == {"plain": 2, "odd": 1, "all": 3}
    short = replace(subject, trained_length=WINDOW)
    narrow = next(suite.measure(short, Wanted()))
    assert narrow.value == measure(subject, tables, overlap=-1)["plain", "bits_per_byte"].value
    assert narrow.value != next(suite.measure(subject, Wanted())).value


def test_without_a_source_it_reads_the_held_out_standard_library(subject, monkeypatch):
    monkeypatch.setattr("k3_train.evaluate.text.heldout_texts", lambda: ["import os", "pass"])
    found = list(open_suite("text").measure(subject, Wanted(limit=1)))
    assert found[0].conditions == {"tokens": 9, "bytes": 9}
    assert [(one.family, one.metric) for one in found] == [
        ("heldout", "bits_per_byte"),
        ("heldout", "perplexity"),
    ]


def test_refusals(subject, tmp_path):
    with pytest.raises(ConfigError, match="overlap"):
        open_suite("text", {"window": 4, "overlap": 4})
    for table, words in (
        ({"path": "x"}, "kind is None"),
        ({"kind": "chat"}, "is endless"),
        ({"kind": "locl"}, "did you mean 'local'"),
    ):
        with pytest.raises(K3Error, match=words):
            measure(subject, {"mine": table})
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(K3Error, match="gave no text"):
        measure(subject, {"mine": {"kind": "local", "path": str(tmp_path / "empty.txt")}})
