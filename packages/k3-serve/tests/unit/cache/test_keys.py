"""Keys of prefixes: what changes them and what does not."""

from __future__ import annotations

import struct
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3_serve.cache import extend_unit_keys, seed_key, unit_keys

SEED = seed_key(3, "tenant", "float32")
IDS = st.lists(st.integers(0, 200_000), max_size=30)


def test_a_key_is_the_hash_of_the_key_before_and_of_its_tokens():
    first, second = unit_keys(SEED, [1, 2, 3, 4, 5], 2)
    assert (
        first
        == blake2b(
            SEED + struct.pack("<qq", 1, 2), digest_size=16, person=b"k3-prefix-unit"
        ).digest()
    )
    assert (
        second
        == blake2b(
            first + struct.pack("<qq", 3, 4), digest_size=16, person=b"k3-prefix-unit"
        ).digest()
    )


@given(first=IDS, second=IDS, unit=st.integers(1, 4))
def test_keys_are_equal_exactly_as_far_as_the_prefixes_are(first, second, unit):
    keys = [unit_keys(SEED, ids, unit) for ids in (first, second)]
    assert [len(k) for k in keys] == [len(ids) // unit for ids in (first, second)]
    for i, pair in enumerate(zip(*keys, strict=False)):
        stop = (i + 1) * unit
        assert (pair[0] == pair[1]) == (first[:stop] == second[:stop])


@given(ids=IDS, unit=st.integers(1, 4), cuts=st.lists(st.integers(0, 30)), data=st.data())
def test_keys_of_a_growing_sequence_are_those_of_the_whole(ids, unit, cuts, data):
    positions = data.draw(st.lists(st.integers(0, len(ids)), max_size=3, unique=True))
    images = [(position, bytes([position])) for position in positions]
    keys: list[bytes] = []
    for cut in [*sorted(cuts), len(ids)]:
        seen = [image for image in images if image[0] < cut]
        assert extend_unit_keys(keys, SEED, ids[:cut], unit, seen) is keys
    assert keys == unit_keys(SEED, ids, unit, images)


def test_everything_that_the_state_depends_on_is_in_the_seed():
    seeds = [
        seed_key(version, salt, dtype)
        for version in (0, 1)
        for salt in ("", "a", "afloat32")
        for dtype in ("float32", "bfloat16", "")
    ]
    assert len({*seeds}) == len(seeds)


def test_the_content_of_an_image_changes_its_unit_and_all_later_ones():
    ids = [7] * 8
    plain, cat, dog, moved, twice = (
        unit_keys(SEED, ids, 2, images)
        for images in ([], [(3, b"cat")], [(3, b"dog")], [(2, b"cat")], [(2, b"c"), (3, b"at")])
    )
    assert plain[0] == cat[0] == dog[0]
    for i in (1, 2, 3):
        assert len({plain[i], cat[i], dog[i], moved[i], twice[i]}) == 5
    assert unit_keys(SEED, ids, 2, [(8, b"cat")]) == plain


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match="unit is 0"):
        unit_keys(SEED, [1], 0)
    with pytest.raises(ValueError, match="position -1"):
        unit_keys(SEED, [1], 1, [(-1, b"cat")])
