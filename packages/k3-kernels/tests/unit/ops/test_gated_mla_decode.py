"""gated_mla_decode in three launches: rows, ranks and strides, what is written, when it is taken.

Interpreted in float16: the interpreter has no bfloat16.
"""

import pytest
import torch

from k3_core.ops.gated_mla_decode.reference import gated_mla_decode as reference
from k3_core.testing.tolerance import TOLERANCE, relative_error
from k3_kernels.gated_mla_decode import op
from k3_kernels.gated_mla_decode.op import gated_mla_decode, takes_three_launches
from k3_kernels.mla_decode import op as decode_op

HEADS, NOPE, SHARED, VALUES, LATENT, PAGE, COLUMNS = 2, 32, 16, 32, 16, 4, 6
NAMED = {"scale": 0.2, "eps": 1e-5}
TOKENS = "page_table_BM", "lengths_B"


def _call(lengths, device, rank=24):
    """Inputs are parts of one matrix, as the projections leave them; pages lie anywhere."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape, scale=1.0):
        values = torch.randn(*shape, generator=generator) * scale
        return values.to(device, torch.float16)

    rows, sizes = len(lengths), (rank, LATENT + SHARED, HEADS * VALUES)
    q, latent, gate = randn(rows, sum(sizes)).split(sizes, dim=-1)
    order = torch.randperm(rows * COLUMNS, generator=generator).view(rows, COLUMNS)
    args = (
        q,
        latent,
        gate.unflatten(-1, (HEADS, VALUES)),
        randn(rank, scale=0.3) + 1,
        randn(HEADS, NOPE + SHARED, rank, scale=rank**-0.5),
        randn(LATENT, scale=0.3) + 1,
        randn(HEADS, NOPE + VALUES, LATENT, scale=LATENT**-0.5),
    )
    cache = {
        "pages_PLX": randn(rows * COLUMNS + 1, PAGE, LATENT + SHARED),
        "page_table_BM": order.to(device),
        "lengths_B": torch.tensor(lengths, device=device),
    }
    return args, cache


def _expected(args, cache):
    pages = cache["pages_PLX"].double()
    exact = {name: cache[name] for name in TOKENS}
    return reference(*(x.double() for x in args), pages_PLX=pages, **exact, **NAMED), pages


@pytest.mark.parametrize(
    ("lengths", "rank", "splits"),
    [((1,), 24, 4), ((4, 5, 24), 64, 1), (tuple(range(1, 20)), 16, 2), ((17, 3) * 5, 40, 8)],
)
def test_rows_and_pages_are_the_reference_s(lengths, rank, splits, device, monkeypatch):
    monkeypatch.setattr(decode_op, "num_splits", lambda *args: splits)
    args, cache = _call(lengths, device, rank)
    assert takes_three_launches(*args, cache["pages_PLX"], cache["page_table_BM"])
    expected, expected_pages = _expected(args, cache)
    before = cache["pages_PLX"].clone()
    y = gated_mla_decode(*args, **cache, **NAMED)
    assert relative_error(y, expected) < TOLERANCE[torch.float16]
    assert relative_error(cache["pages_PLX"], expected_pages) < TOLERANCE[torch.float16]
    # Only the rows' own places change.
    assert int((cache["pages_PLX"] != before).any(-1).sum()) == len(lengths)


def test_rows_of_one_sequence_see_the_tokens_up_to_their_own(device):
    args, cache = _call((5, 6, 7), device)
    cache["page_table_BM"][1:] = cache["page_table_BM"][0]
    expected, expected_pages = _expected(args, cache)
    y = gated_mla_decode(*args, **cache, **NAMED)
    assert relative_error(y, expected) < TOLERANCE[torch.float16]
    assert relative_error(cache["pages_PLX"], expected_pages) < TOLERANCE[torch.float16]


def test_a_row_whose_place_is_not_in_its_pages_writes_nothing(device):
    args, cache = _call((0, PAGE * COLUMNS + 1, 2), device)
    before = cache["pages_PLX"].clone()
    y = gated_mla_decode(*args, **cache, **NAMED)
    changed = (cache["pages_PLX"] != before).any(-1).nonzero()
    assert changed.tolist() == [[int(cache["page_table_BM"][2, 0]), 1]]
    assert not y[0].any()


def test_many_rows_and_other_widths_are_left_to_the_parts(device, monkeypatch):
    args, cache = _call((2, 9), device)
    tables = cache["pages_PLX"], cache["page_table_BM"]
    exact = [x.float() for x in args]
    assert not takes_three_launches(*exact, *tables)
    monkeypatch.setattr(op, "MAX_BYTES", 1024)
    assert not takes_three_launches(*args, *tables)
    monkeypatch.undo()
    monkeypatch.setattr(op, "MAX_ROWS", 1)
    assert not takes_three_launches(*args, *tables)
    expected, _ = _expected(args, cache)
    y = gated_mla_decode(*args, **cache, **NAMED)
    assert relative_error(y, expected) < TOLERANCE[torch.float16]


def test_shapes_that_do_not_fit_are_named(device):
    args, cache = _call((2,), device)
    with pytest.raises(ValueError, match=r"the latent must be \[1, 32\]"):
        gated_mla_decode(args[0], args[1][:, 1:], *args[2:], **cache, **NAMED)
    cache["pages_PLX"] = cache["pages_PLX"][..., :-1]
    with pytest.raises(ValueError, match="pages must be"):
        gated_mla_decode(*args, **cache, **NAMED)
