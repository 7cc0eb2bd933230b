"""Properties of the tokenizer: round trip, tokenizer.json, incremental UTF-8 (architecture 7)."""

import itertools
from collections import Counter
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3_core.tokenizer import K3Tokenizer, Utf8Stream

SAMPLES = (
    "the cat that they met at the 1234567 hats isn't theirs; IT'S THE CAT'S, they'll eat. "
    "  spaces   and\n\n\tlines\r\n  end  def f(x):\n    return x**2  # 3.14159 "
    "日本語の文字と中文字符 ÀÉÎ naïve Ünï ΑΒΓ абв İstanbul 🚀🔥 한국어 aaaaaaaaaaaaaaaaaaa <|open|>"
)
# Fragments that meet every alternative of the pre-tokenizer, between arbitrary characters.
fragments = st.lists(st.sampled_from(SAMPLES.split(" ")) | st.text(max_size=5), max_size=12)
spaces = st.sampled_from(["", " ", "  ", "\n", " \n", "\t", "\u3000", "\u2028"])
texts = st.builds(lambda parts, gap: gap.join(parts), fragments, spaces)


@cache
def trained() -> K3Tokenizer:
    """A small vocabulary made by the definition of byte pair encoding, over whole samples."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [
        [bytes([b]) for b in word.encode()] for word in SAMPLES.replace(" ", " \0").split("\0")
    ]
    while len(ranks) < 400:
        counts = Counter(pair for word in words for pair in itertools.pairwise(word))
        left, right = max(sorted(counts), key=counts.__getitem__)
        ranks.setdefault(left + right, len(ranks))
        words = [_join(word, left, right) for word in words]
    return K3Tokenizer(ranks, num_base_tokens=len(ranks))


def _join(word: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    joined: list[bytes] = []
    for part in word:
        if joined and (joined[-1], part) == (left, right):
            joined[-1] = left + right
        else:
            joined.append(part)
    return joined


@given(texts, st.booleans())
def test_decode_reverses_encode(text, allow_special):
    tokenizer = trained()
    assert tokenizer.decode(tokenizer.encode(text, allow_special)) == text


@given(texts)
def test_plain_text_never_has_a_special_id(text):
    ids = trained().encode(text + "<|end_of_msg|>[EOS]" + text)
    assert max(ids) < trained().num_base_tokens


@pytest.fixture(scope="module")
def fast_tokenizer(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("saved")
    trained().save_pretrained(folder)
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def fast_with_gaps(tmp_path_factory, mini_tiktoken):
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("gaps")
    tokenizer = K3Tokenizer.from_ranks(mini_tiktoken, num_base_tokens=163_584)
    tokenizer.save_pretrained(folder)
    return tokenizer, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@given(text=texts)
def test_tokenizer_json_gives_the_same_ids(fast_tokenizer, text):
    assert fast_tokenizer.encode(text).ids == trained().encode(text, allow_special=True)
    ids = trained().encode(text)
    assert fast_tokenizer.decode(ids, skip_special_tokens=False) == text


@given(text=texts)
def test_tokenizer_json_of_ranks_with_gaps_gives_the_same_ids(fast_with_gaps, text):
    tokenizer, fast = fast_with_gaps
    assert fast.encode(text).ids == tokenizer.encode(text, allow_special=True)


@given(st.binary(max_size=40) | st.text().map(str.encode), st.data())
def test_utf8_stream_equals_the_whole_decoding(data, draw):
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=8)))
    stream, text = Utf8Stream(), ""
    for start, end in itertools.pairwise([0, *cuts, len(data)]):
        text += stream.feed(data[start:end])
        stream = Utf8Stream(stream.pending)
    assert text + stream.flush() == data.decode("utf-8", "replace")
    assert stream.pending == b""


def test_utf8_stream_waits_for_the_whole_character():
    stream = Utf8Stream()
    rocket = "🚀".encode()
    assert [stream.feed(rocket[i : i + 1]) for i in range(4)] == ["", "", "", "🚀"]
    assert stream.feed(rocket[:3]) == ""
    assert stream.flush() == "\ufffd"
