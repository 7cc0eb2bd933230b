"""Any JSON that is added to a released config.json comes back unchanged."""

import json

from hypothesis import given
from hypothesis import strategies as st

from k3_core.config import K3Config, apply_overrides

KEYS = st.text("abcdefghij_", min_size=1, max_size=8).map(lambda name: f"x_{name}")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
EXTRAS = st.dictionaries(KEYS, VALUES, max_size=3)


@given(top=EXTRAS, text=EXTRAS, linear=EXTRAS)
def test_unknown_fields_survive(golden, top, text, linear):
    data = json.loads((golden("mxfp4_tiny") / "config.json").read_text())
    data.update(top)
    data["text_config"].update(text)
    data["text_config"]["linear_attn_config"].update(linear)
    assert json.dumps(K3Config.from_dict(data).to_dict()) == json.dumps(data)


NUMBERS = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(st.lists(KEYS, min_size=2, max_size=2), NUMBERS), max_size=5))
def test_later_overrides_win(items):
    result = apply_overrides({}, [f"{'.'.join(path)}={value!r}" for path, value in items])
    expected = {}
    for (table, key), value in items:
        expected.setdefault(table, {})[key] = value
    assert result == expected
