"""Rank files, special slots, long and broken text, and the saved folder (architecture 7)."""

import base64
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from k3_core.errors import K3Error
from k3_core.tokenizer import K3Tokenizer, TokenizerError
from k3_core.tokenizer.text import cut_long

BYTES = [bytes([byte]) for byte in range(256)]
WORDS = [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"ld", b" world", b"12", b"123"]


def rank_file(path: Path, ranks: dict[bytes, int]) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture()
def ranks() -> dict[bytes, int]:
    tokens = BYTES + WORDS
    return {token: rank for rank, token in enumerate(tokens)}


@pytest.fixture()
def tokenizer(ranks: dict[bytes, int]) -> K3Tokenizer:
    return K3Tokenizer(ranks, num_base_tokens=len(ranks))


def test_merges_words_and_at_most_three_digits(tokenizer):
    def spell(text: str) -> list[bytes]:
        return [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]

    assert spell("hello world") == [b"hello", b" world"]
    assert spell("123123") == [b"123", b"123"]
    assert spell("1231") == [b"123", b"1"]


def test_special_spellings_are_text_unless_allowed(tokenizer):
    text = "a<|open|>[EOS]"
    plain = tokenizer.encode(text)
    assert max(plain) < tokenizer.num_base_tokens
    special = tokenizer.encode(text, allow_special=True)
    assert special == [ord("a"), tokenizer.open_id, tokenizer.eos_id]
    assert tokenizer.decode(plain) == tokenizer.decode(special) == text


def test_ranks_may_have_gaps_and_slots_follow_the_base(tmp_path, ranks):
    moved = {token: rank + (500 if len(token) > 1 else 0) for token, rank in ranks.items()}
    tokenizer = K3Tokenizer.from_ranks(rank_file(tmp_path / "r", moved), num_base_tokens=1000)
    assert tokenizer.encode("hello") == [moved[b"hello"]]
    assert tokenizer.bos_id == 1000
    assert tokenizer.pad_id == 1255
    assert tokenizer.token_bytes(1008) == b"<|reserved_token_1008|>"
    with pytest.raises(ValueError, match="token id 999 has no token"):
        tokenizer.decode([999])
    with pytest.raises(ValueError, match="token id 1256 has no token"):
        tokenizer.token_bytes(1256)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("YQ== x", "line 268.*is not `base64 rank`"),
        ("a? 267", "line 268.*is not `base64 rank`"),
        ("YWE= 400", r"rank 400 is not in 0\.\.266"),
        ("YWE= 266", "came before"),
        ("YQ== 266", "came before"),
    ],
)
def test_bad_rank_lines_are_named(tmp_path, ranks, line, message):
    path = rank_file(tmp_path / "r", ranks)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=message):
        K3Tokenizer.from_ranks(path, num_base_tokens=267)


def test_a_rank_file_needs_every_byte(tmp_path, ranks):
    del ranks[b"\x80"]
    with pytest.raises(ValueError, match="lacks 1 of the 256 single bytes, first 0x80"):
        K3Tokenizer.from_ranks(rank_file(tmp_path / "r", ranks), num_base_tokens=300)


def test_surrogates_pair_up_or_become_the_replacement_character(tokenizer):
    assert tokenizer.encode("\ud83d\ude80") == tokenizer.encode("\U0001f680")
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")


def test_long_text_is_cut_by_characters_and_by_runs():
    text = "x" * 60_000 + " " * 30_000 + "ab " * 200_000
    pieces = list(cut_long(text))
    assert "".join(pieces) == text
    run_ends = [25_000, 50_000, 85_000, 400_000]
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    assert ends == [*run_ends, len(text)]
    assert list(cut_long("x" * 25_000)) == ["x" * 25_000]
    assert list(cut_long("")) == []


def test_cuts_are_token_borders(ranks):
    pair = K3Tokenizer({**ranks, b"xx": len(ranks)}, len(ranks) + 1)
    # 24,999 x's end one character before the cut, so the cut splits what would be a pair.
    ids = pair.encode("." + "x" * 30_000)
    assert ids.count(ord("x")) == 2
    assert pair.decode(ids) == "." + "x" * 30_000


def test_saved_folder_loads_and_saves_byte_identically(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "a")
    K3Tokenizer.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["tiktoken.model", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_another_tokenizer_s_folder_is_refused(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"]["270"]["content"] = "<|im_end|>"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"<\|im_end\|>"):
        K3Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_a_folder_without_one_of_the_files_names_it(tmp_path, tokenizer, name):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # a model's folder all the same
    (tmp_path / name).unlink()
    with pytest.raises(TokenizerError, match=rf"{name}: No such file.*holds tiktoken\.model"):
        K3Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"added_tokens_decoder": {"x": 1}}'])
def test_a_damaged_tokenizer_configuration_is_named(tmp_path, tokenizer, text):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json does not describe"):
        K3Tokenizer.from_pretrained(tmp_path)


def test_a_bundled_model_is_found_by_its_name(tmp_path):
    assert K3Tokenizer.from_pretrained("k3-nano").vocab_size == 4096
    with pytest.raises(K3Error, match=r"k3-nanu.*not a bundled model.*k3-nano"):
        K3Tokenizer.from_pretrained("k3-nanu")


def test_saving_and_decoding_need_neither_tiktoken_nor_tokenizers(tmp_path, ranks):
    path = rank_file(tmp_path / "r", ranks)
    code = (
        "import sys; sys.modules['tiktoken'] = sys.modules['tokenizers'] = None\n"
        "from k3_core.tokenizer import K3Tokenizer\n"
        f"t = K3Tokenizer.from_ranks({str(path)!r}, {len(ranks)})\n"
        f"t.save_pretrained({str(tmp_path / 'out')!r})\n"
        "print(t.decode([104, 105]), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "hi False\n", done.stderr


def test_encoding_opens_no_socket(monkeypatch, ranks):
    def refuse(*_: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert K3Tokenizer(ranks, len(ranks)).encode("hi") == [104, 105]
