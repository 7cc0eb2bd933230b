"""Stop strings against a character-by-character oracle, and independent of the pieces."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from k3_core.engine import Sampling, StopMatcher
from k3_core.engine.stops import StopWatch

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop that ends first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(text=st.text("abc", max_size=12), stops=STOPS, cuts=st.sets(st.integers(0, 12)))
def test_the_cut_is_exact_whatever_the_pieces(text: str, stops: list[str], cuts: set[int]) -> None:
    matcher = StopMatcher(stops)
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    emitted = "".join(matcher.feed(text[a:b]) for a, b in itertools.pairwise(edges))
    emitted += matcher.flush()
    assert (emitted, matcher.matched) == oracle(text, stops)


@given(text=st.text("abc", max_size=12), stops=STOPS)
def test_only_the_longest_live_match_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    for end, letter in enumerate(text, 1):
        emitted += matcher.feed(letter)
        if matcher.matched is None:
            held = text[len(emitted) : end]
            live = [
                text[k:end] for k in range(end) if any(s.startswith(text[k:end]) for s in stops)
            ]
            assert held == max(live, key=len, default="")


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("one END two") == "one "
    assert matcher.feed("more") == ""
    assert matcher.flush() == ""


class Pieces:
    """A tokenizer whose tokens are given byte strings."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def test_the_watch_sees_a_stop_split_inside_a_character() -> None:
    text = "über".encode()
    tokenizer = Pieces(text[:1], text[1:2], text[2:])
    watch = StopWatch(Sampling(stop=("üb",)), tokenizer, channel=None)
    assert [watch.feed(i) for i in range(3)] == [False, False, True]


def test_without_stop_strings_no_tokenizer_is_needed() -> None:
    assert not StopWatch(Sampling(), None, channel="think").feed(5)
