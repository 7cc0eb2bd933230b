"""`k3 train data build`: counts, interruption, workers, shards, memory, the commands."""

import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from k3_core.errors import K3Error
from k3_core.tokenizer import K3Tokenizer
from k3_core.tokenizer.ranks import write_ranks
from k3_train.config import TrainConfig
from k3_train.data.clean.pipeline import Cleaner
from k3_train.data.cli import data_app
from k3_train.data.corpus import build_corpus
from k3_train.data.documents import Document, Entry
from k3_train.data.sources.local import LocalSource
from k3_train.data.sources.long import LongContextSource
from k3_train.data.token_file import TokenFile
from k3_train.loop.corpus import open_sampler
from k3_train.loop.trainer import Trainer

BYTES = {bytes([byte]): byte for byte in range(256)}
TOKENIZER = K3Tokenizer(BYTES, 256)


def sentence(number: int) -> str:
    rng = random.Random(number)
    return " ".join(f"w{rng.randrange(10_000)}" for _ in range(20)) + ".\n"


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A hundred documents, of which five are copies, three are short and one is a near copy."""
    texts = [sentence(number) for number in range(91)]
    texts += [*texts[:5], "a", "b", "c", texts[9].replace(".", " more.")]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_the_manifest_counts_what_was_dropped(lines: Path, tmp_path: Path) -> None:
    source = LocalSource(str(lines))
    file = build_corpus(tmp_path / "out", TOKENIZER, source, kind="local", cleaner=Cleaner())
    sources = file.manifest["sources"]
    assert sources["kind"] == "local" and sources["options"]["path"] == str(lines)
    cleaning = sources["cleaning"]
    assert (cleaning["read"], cleaning["kept"]) == (100, 91)
    assert cleaning["dropped"] == {"exact_duplicate": 5, "too_short": 3, "near_duplicate": 1}
    assert file.num_documents == 91
    assert [name for name, _ in file.names()] == [f"lines.jsonl:{i}" for i in range(1, 92)]
    ids = file.document(90)
    assert (ids[0], ids[-1]) == (TOKENIZER.bos_id, TOKENIZER.eos_id)
    assert TOKENIZER.decode(ids[1:-1]) == sentence(90)
    file.verify()


@pytest.mark.multiproc
def test_workers_change_no_token(lines: Path, tmp_path: Path) -> None:
    source = LocalSource(str(lines))
    plain = build_corpus(tmp_path / "a", TOKENIZER, source, kind="local", workers=1)
    spread = build_corpus(tmp_path / "b", TOKENIZER, source, kind="local", workers=2)
    assert spread.manifest == plain.manifest


def test_shards_are_filled_in_turn(tmp_path: Path) -> None:
    source = LongContextSource(families=("needle",), min_chars=400, max_chars=500)
    file = build_corpus(
        tmp_path / "a",
        TOKENIZER,
        source,
        kind="long_context",
        num_tokens=20_000,
        shard_tokens=9_000,
    )
    sizes = file.manifest["shards"]
    assert len(sizes) > 1 and sum(sizes) == file.num_tokens and min(sizes[:-1]) >= 9_000
    assert file.manifest["sources"]["questions"] == {"needle": file.num_documents}
    file.verify()


def test_loss_is_on_answers_only(tmp_path: Path) -> None:
    source = LongContextSource(families=("needle",), min_chars=400, max_chars=500)
    file = build_corpus(tmp_path / "a", TOKENIZER, source, kind="long_context", num_tokens=5_000)
    assert file.mask is not None
    start, stop = file.documents[:2]
    ids, mask = file.document(0), file.mask[start:stop].tolist()
    with_loss = [token for token, flag in zip(ids, mask, strict=True) if flag]
    assert TOKENIZER.decode(with_loss[:-1]).isdigit() and with_loss[-1] == TOKENIZER.eos_id
    assert mask == sorted(mask)


class Interrupted:
    """A source that fails after some documents."""

    def entries(self) -> Iterator[Entry]:
        for number in range(1000):
            yield Document(f"{number}.txt", sentence(number).encode())
        raise KeyboardInterrupt


def test_nothing_is_left_of_an_interrupted_build(lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        build_corpus(out, TOKENIZER, Interrupted(), kind="test")
    assert sorted(path.name for path in tmp_path.iterdir()) == [lines.name]
    kept = build_corpus(out, TOKENIZER, LocalSource(str(lines)), kind="local").manifest
    with pytest.raises(KeyboardInterrupt):
        build_corpus(out, TOKENIZER, Interrupted(), kind="test")
    assert TokenFile.open(out).manifest == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == [lines.name, "out"]


def test_nothing_to_write_and_no_end_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("short")
    with pytest.raises(K3Error, match=r"gave no document: cleaning dropped all.*too_short"):
        build_corpus(
            tmp_path / "x", TOKENIZER, LocalSource(str(path)), kind="local", cleaner=Cleaner()
        )
    with pytest.raises(K3Error, match="has no end: say how many tokens to make with --tokens"):
        build_corpus(tmp_path / "x", TOKENIZER, LongContextSource(), kind="long_context")


class Large:
    """Different documents of 300 bytes."""

    def __init__(self, count: int) -> None:
        self.count = count

    def entries(self) -> Iterator[Entry]:
        for number in range(self.count):
            text = f"{number} " * 5 + sentence(number % 7) * 2
            yield Document(f"{number}.txt", text.encode())


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        tracemalloc.start()
        build_corpus(tmp_path / "out", TOKENIZER, Large(count), kind="test")
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    few, many = peak(600), peak(2400)  # three batches, and twelve
    assert many < 1.3 * few


def run(*words: str) -> str:
    result = CliRunner().invoke(data_app, words)
    if result.exception is not None:
        raise result.exception
    return result.output


def test_the_commands_build_print_and_check(lines: Path, tmp_path: Path) -> None:
    write_ranks(tmp_path / "ranks", BYTES)
    out = tmp_path / "data"
    common = ("--out", str(out), "--tokenizer", str(tmp_path / "ranks"), "--num-base-tokens", "256")
    path = f"path='{lines}'"
    printed = run(
        "build", "local", *common, "--set", path, "--rule", "near=false", "--workers", "1"
    )
    assert "in 92 documents" in printed
    assert "kept 92 of 100 documents; dropped 5 exact_duplicate, 3 too_short" in printed
    assert "dropped 5 exact_duplicate" in run("stats", str(out), "--verify")
    run("build", "local", *common, "--set", path, "--no-clean", "--name", "raw", "--workers", "1")
    assert TokenFile.open(out / "raw").num_documents == 100
    assert "local, raw as the manifest says" in run("check", str(out))
    assert "no problem" in run("check", str(lines))
    assert "text_key = 'text'" in run("sources")
    lines.write_text('{"text": 1}\n')
    with pytest.raises(K3Error, match="not fit for training: 1 problems"):
        run("check", str(lines))


def test_a_trained_classifier_cleans(tmp_path: Path) -> None:
    write_ranks(tmp_path / "ranks", BYTES)
    for name, word in (("good", "theorem"), ("bad", "casino")):
        rows = [{"text": f"{word} {sentence(i)} {word}"} for i in range(40)]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    good, bad, out = (str(tmp_path / name) for name in ("good.jsonl", "bad.jsonl", "q.safetensors"))
    assert "held-out 100.0% right" in run("quality", "--good", good, "--bad", bad, "--out", out)
    common = ("--tokenizer", str(tmp_path / "ranks"), "--num-base-tokens", "256", "--workers", "1")
    printed = run(
        *("build", "local", "--out", str(tmp_path / "d"), "--set", f"path='{tmp_path}'"),
        *("--set", "suffixes=['.jsonl']", "--quality", out, *common),
    )
    assert "kept 40 of 80 documents; dropped 40 low_quality" in printed


def test_rows_account_for_the_sources(
    make_trainer: Callable[..., Trainer],
    tiny_settings: Callable[..., TrainConfig],
    tiny_data: Path,
    tmp_path: Path,
) -> None:
    settings = ("run.events=['source_tokens']", "data.tokens_per_batch=64", "run.accumulation=2")
    sampler = open_sampler(tiny_settings(*settings), tiny_data)
    trainer = make_trainer(tmp_path / "run", *settings, sampler=sampler)
    trainer.state.step = 5
    total = TokenFile.open(tiny_data / "words").num_tokens
    assert trainer.state.events.row_values(trainer) == {
        "tokens_words": 5 * 2 * 64,
        "epochs_words": round(5 * 2 * 64 / total, 6),
    }
