"""`k3 train data check` names the line and column at fault."""

import json
from pathlib import Path

import pytest

from k3_core.errors import K3Error
from k3_train.data.check import check_file, check_token_files
from k3_train.data.token_file import TokenFileWriter


@pytest.mark.parametrize(
    "line, where, found",
    [
        (b'{"text": "a"', 13, "Expecting ',' delimiter"),
        (b'{"text": "a"} x', 15, "Extra data"),
        (b"", 1, "Expecting value"),
        (b'["text"]', 1, "a JSON array"),
        (b'{"id": 1, "body": "x"}', 1, "no key 'text', the keys are 'body', 'id'"),
        (b'{"id": 1, "text": 5}', 11, "'text' is a JSON number"),
        (b'{"text": null}', 2, "'text' is a JSON null"),
        (b'{"text": "\xc3\xa9\xff"}', 12, "byte 0xff"),
        (b'{"text": "a\0"}', 12, "a zero byte"),
        (b'{"text": "ab\\ud800"}', 1, "character 2 of the text is half of a surrogate pair"),
        (b"[" * 100_000, 1, "JSON nested too deeply"),
    ],
)
def test_bad_lines(tmp_path: Path, line: bytes, where: int, found: str) -> None:
    good = b'{"text": "fine \xe2\x80\xa8 here"}\n'
    path = tmp_path / "a.jsonl"
    path.write_bytes(good + line + b"\n" + good)
    (problem,) = check_file(path)
    assert (problem.line, problem.column, problem.found) == (2, where, found)
    assert str(problem).startswith(f"2:{where}: {found}; expected ")


def test_good_files_have_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": f"\n{i}"}) + "\n" for i in range(50)))
    assert list(check_file(path, "body")) == []
    text = tmp_path / "a.txt"
    text.write_bytes("grün\n".encode("latin-1"))
    (problem,) = check_file(text)
    assert (problem.line, problem.column, problem.found) == (1, 3, "byte 0xfc")
    with pytest.raises(K3Error, match="is no file"):
        list(check_file(tmp_path / "absent"))


def test_token_files_are_verified(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with TokenFileWriter(tmp_path / name, vocab_size=99, has_mask=False, sources={}) as out:
            out.add([1, 2, 3], [1, 2])
    assert check_token_files(tmp_path) == ["a", "b"]
    (tmp_path / "b" / "tokens.bin").write_bytes(bytes(6))
    with pytest.raises(K3Error, match=r"b/tokens.bin has sha256"):
        check_token_files(tmp_path)
    with pytest.raises(K3Error, match="holds no token file"):
        check_token_files(tmp_path / "a" / "x")
