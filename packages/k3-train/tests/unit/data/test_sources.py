"""Sources: what they read, in which order, and what they refuse."""

import gzip
import json
from importlib.metadata import version
from pathlib import Path

import pytest

from k3_core.config import ConfigError
from k3_core.errors import K3Error
from k3_train.data.documents import Corpus, Document, Example, Generator
from k3_train.data.sources.debian import html_text, manual_text
from k3_train.data.sources.long import join_documents
from k3_train.data.sources.open import open_source, source_names


def documents(name: str, *sets: str) -> list[Document]:
    source = open_source(name, sets=sets)
    assert isinstance(source, Corpus)
    return [entry for entry in source.entries() if isinstance(entry, Document)]


def test_a_folder_is_read_by_path_and_suffix(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_text("first")
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as lines:
        lines.write('{"text": "third"}\n{"text": "fourth"}\n')
    found = documents("local", f"path='{tmp_path}'")
    assert [one.name for one in found] == ["a/x.md", "b.txt", "c.jsonl.gz:1", "c.jsonl.gz:2"]
    assert [one.text for one in found] == ["first", "second", "third", "fourth"]
    assert len(documents("local", f"path='{tmp_path}'", "suffixes=['.md']")) == 1
    with pytest.raises(K3Error, match=r"no file with a suffix of \['.rs'\].*'.jsonl'"):
        documents("local", f"path='{tmp_path}'", "suffixes=['.rs']")


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"txt": "bad"}\n')
    with pytest.raises(K3Error, match=r"a.jsonl:2:1: no key 'text', the keys are 'txt'"):
        documents("local", f"path='{path}'")


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    texts = [f"row {i}" for i in range(600)]
    parquet.write_table(pyarrow.table({"id": list(range(600)), "body": texts}), path)
    assert [d.text for d in documents("local", f"path='{path}'", "text_key=body")] == texts
    with pytest.raises(K3Error, match=r"no column 'text', it has \['id', 'body'\]"):
        documents("local", f"path='{path}'")
    path.write_bytes(b"nothing")
    with pytest.raises(K3Error, match="is no Parquet file"):
        documents("local", f"path='{path}'")


def test_an_absent_library_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(K3Error, match=r"needs pyarrow.*pip install 'k3-train\[parquet\]'"):
        documents("local", f"path='{tmp_path}'")


def test_packages_are_read_by_distribution() -> None:
    source = open_source("packages", sets=["names=['pluggy', 'Typing_Extensions']"])
    assert isinstance(source, Corpus)
    names = [one.name for one in documents("packages", "names=['pluggy', 'Typing_Extensions']")]
    assert {"pluggy/pluggy/_hooks.py", "typing-extensions/typing_extensions.py"} <= set(names)
    assert source.describe() == {  # type: ignore[attr-defined]
        "versions": {
            "pluggy": version("pluggy"),
            "typing-extensions": version("typing-extensions"),
        }
    }
    with pytest.raises(K3Error, match="'plugy' is not installed; did you mean 'pluggy'"):
        documents("packages", "names=['plugy']")


def test_debian_packages_are_read_from_their_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "share"
    (root / "man1").mkdir(parents=True)
    with gzip.open(root / "man1" / "tool.1.gz", "wt") as page:
        page.write(".TH TOOL 1\n.SH NAME\ntool \\- does it\n.BR other (1)\n")
    (root / "copyright").write_text("licence")
    (root / "README.md").write_text("Read me.")
    (root / "picture.png").write_bytes(b"\x89PNG")
    paths = sorted(str(path) for path in root.rglob("*"))
    (tmp_path / "tool.list").write_text("\n".join([*paths, f"{root}/gone.txt"]))
    monkeypatch.setattr("k3_train.data.sources.debian.FOLDERS", (str(root),))
    monkeypatch.setattr("k3_train.data.sources.debian.MANUALS", "/man1/")
    found = documents("debian", f"lists='{tmp_path}'", "packages=['tool']")
    assert {Path(one.name).name: one.text for one in found} == {
        "README.md.txt": "Read me.",
        "tool.1.txt": "NAME\ntool - does it\nother (1)\n",
    }
    with pytest.raises(K3Error, match="'tol' is not installed, did you mean 'tool'"):
        documents("debian", f"lists='{tmp_path}'", "packages=['tol']")
    with pytest.raises(K3Error, match=r"has no list of a package.*`stdlib`, `packages` or `local`"):
        documents("debian", f"lists='{root}'")


def test_html_and_manuals_become_plain_text() -> None:
    page = "<head><title>x</title></head><p>One&amp;<b>two</b></p><script>no()</script><p>three"
    assert html_text(page) == "One&two\n\nthree\n"
    assert manual_text('.\\" note\n.B bold\n\\fIx\\fR \\(lqy\\(rq\n') == 'bold\nx "y"\n'


def test_unknown_sources_and_options_are_refused() -> None:
    assert {"stdlib", "packages", "debian", "local", "chat", "long_context"} <= set(source_names())
    with pytest.raises(K3Error, match="no source 'stdlb'; did you mean 'stdlib'"):
        open_source("stdlb")
    with pytest.raises(ConfigError, match=r"local.text_kye: unknown key. Did you mean 'text_key'"):
        open_source("local", sets=["path=x", "text_kye=y"])
    with pytest.raises(ConfigError, match=r"local\.path: is missing"):
        open_source("local")


def test_blocks_of_long_context_are_functions_of_their_number() -> None:
    source = open_source("long_context", sets=["min_chars=3000", "max_chars=4000"])
    assert isinstance(source, Generator)
    block = source.block(5)
    assert block == source.block(5) and block != source.block(6)
    for entry in block:
        assert isinstance(entry, Example)
        assert 2700 <= len(entry.prompt) <= 4000


def test_joined_documents_are_permuted_and_asked_about(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": f"Body of text {i}.\n\nIt ends here with {i}."} for i in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = ("base=local", f"options.path='{path}'", "chars=2000", "buffer=50", "clean=false")
    source = open_source("long_documents", sets=sets)
    assert isinstance(source, Corpus)
    found = [entry for entry in source.entries() if isinstance(entry, Example)]
    assert found == list(open_source("long_documents", sets=sets).entries())  # type: ignore[union-attr]
    bodies = [i for i in range(200) if sum(f"Body of text {i}." in one.answer for one in found)]
    assert len(bodies) == len(set(bodies)) > 150
    for one in found:
        assert one.prompt == "" and one.families[-1] == "order" and len(one.families) == 4
        assert one.answer.count("Question: ") == 4
        headings = [line for line in one.answer.splitlines() if line.startswith("=== Document")]
        asked = one.answer.rpartition("\nAnswer:\n")[2].strip().split(", ")
        places = [next(i for i, h in enumerate(headings) if f": {n} ===" in h) for n in asked]
        assert places == sorted(places)
    with pytest.raises(ConfigError, match="'chat' is endless"):
        list(open_source("long_documents", sets=["base=chat"]).entries())  # type: ignore[union-attr]


def test_the_facts_of_a_task_come_in_order() -> None:
    import random

    documents = [Document(f"d{i}", f"one {i}\n\ntwo {i}".encode()) for i in range(30)]
    for seed in range(10):
        text = join_documents(documents, 2, random.Random(seed)).answer
        order = [text.index(f"one {i}\n") for i in range(30)]
        assert order == sorted(order)
