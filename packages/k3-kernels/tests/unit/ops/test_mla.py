"""mla_prefill and mla_decode beyond the conformance battery.

T queries, S keys, H heads, D head dim, V value dim, P pages of L tokens, X cached values a token.
"""

import pytest
import torch

from k3_core.ops.mla_decode.reference import mla_decode as decode_reference
from k3_core.ops.mla_prefill.reference import mla_prefill as prefill_reference
from k3_core.testing import relative_error
from k3_kernels.mla_decode import op as decode_op
from k3_kernels.mla_decode.op import mla_decode, num_splits
from k3_kernels.mla_prefill import forward as prefill_forward
from k3_kernels.mla_prefill.forward import Tile
from k3_kernels.mla_prefill.op import mla_prefill


def _randn(*shape: int, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _offsets(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(device)


def _prefill_args(queries, keys, device, dims=(48, 24), heads=2):
    args = (
        _randn(sum(queries), heads, dims[0], device=device),
        _randn(sum(keys), heads, dims[0], device=device, seed=1),
        _randn(sum(keys), heads, dims[1], device=device, seed=2),
    )
    offsets = {"cu_seqlens_q": _offsets(queries, device), "cu_seqlens_k": _offsets(keys, device)}
    return args, {"scale": dims[0] ** -0.5, **offsets}


@pytest.mark.parametrize("is_tma", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "dims"),
    [
        ((45,), (45,), (48, 24)),
        ((0, 17, 1, 0), (3, 40, 1, 0), (48, 24)),
        ((5, 20, 31), (21, 20, 64), (192, 128)),
    ],
)
def test_prefill(queries, keys, dims, is_tma, device, monkeypatch):
    monkeypatch.setitem(prefill_forward.TILES, 4, Tile(16, 16, 4, 1, is_tma))
    args, named = _prefill_args(queries, keys, device, dims)
    got, largest = mla_prefill(*args, **named, return_max=True)
    exact = [x.double() for x in args]
    expected, expected_max = prefill_reference(*exact, **named, return_max=True)
    assert relative_error(got, expected) < 1e-5
    assert relative_error(largest, expected_max) < 1e-6


def test_prefill_in_half_keeps_a_float32_output(device):
    args, named = _prefill_args((20,), (33,), device)
    half = [x.half() for x in args]
    got = mla_prefill(*half, **named, out_dtype=torch.float32)
    assert got.dtype == torch.float32
    expected = prefill_reference(*(x.double() for x in half), **named)
    rounded = mla_prefill(*half, **named)
    assert relative_error(got, expected) < 5e-4
    assert torch.equal(got.half(), rounded)


def test_prefill_of_the_widest_heads(device):
    # On a GPU three stages of 256 + 256 values would not fit.
    args, named = _prefill_args((20,), (33,), device, (256, 256), 1)
    half = [x.half() for x in args]
    expected = prefill_reference(*(x.double() for x in half), **named)
    assert relative_error(mla_prefill(*half, **named), expected) < 1e-3


@pytest.mark.parametrize("is_tma", [False, True])
def test_prefill_keeps_nan_and_tail_memory_out(is_tma, device, monkeypatch):
    # Rows behind a sequence are masked as keys and as values: 0 * NaN is NaN
    # (flash-linear-attention issue 1142 is the same mistake in another kernel).
    monkeypatch.setitem(prefill_forward.TILES, 4, Tile(16, 16, 4, 1, is_tma))
    (q, k, v), named = _prefill_args((19, 7), (19, 7), device)
    padded = [torch.cat((x, torch.full_like(x, float("nan")))) for x in (q, k, v)]
    for x in padded:
        x[19:26] = float("nan")
    got = mla_prefill(*(x[:26] for x in padded), **named)
    named = {**named, **{name: _offsets((19,), device) for name in named if name != "scale"}}
    expected = prefill_reference(*(x[:19].double() for x in (q, k, v)), **named)
    assert relative_error(got[:19], expected) < 1e-5
    assert got[19:].isnan().all()


def test_prefill_reads_strided_heads(device):
    # k and v as halves of one projection; q as a slice of a wider matrix.
    joined = _randn(23, 2, 72, device=device)
    k, v = joined.split((48, 24), dim=-1)
    q = _randn(23, 2, 64, device=device, seed=3)[..., 8:56]
    offsets = _offsets((23,), device)
    named = {"scale": 0.2, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    expected = prefill_reference(q.double(), k.double(), v.double(), **named)
    assert relative_error(mla_prefill(q, k, v, **named), expected) < 1e-5


def test_prefill_errors(device):
    args, named = _prefill_args((4,), (4,), device)
    with pytest.raises(ValueError, match="not positive"):
        mla_prefill(*args, **{**named, "scale": -1.0})
    with pytest.raises(ValueError, match="at least as many keys"):
        mla_prefill(*args, **named, seqlens_q=(4,), seqlens_k=(3,))
    with pytest.raises(TypeError, match="use one dtype"):
        mla_prefill(args[0].half(), *args[1:], **named)


def _decode_args(lengths, device, page=4, heads=3, latent=32, shared=8, per_row=8):
    rows = len(lengths)
    order = torch.randperm(rows * per_row, generator=torch.Generator().manual_seed(5))
    return (
        _randn(rows, heads, latent, device=device),
        _randn(rows, heads, shared, device=device, seed=1),
        _randn(rows * per_row, page, latent + shared, device=device, seed=2),
        order.view(rows, per_row).to(device),
        torch.tensor(lengths).to(device),
    )


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize(("page", "per_row"), [(4, 40), (16, 10), (32, 5), (5, 32)])
def test_decode(splits, page, per_row, device, monkeypatch):
    monkeypatch.setattr(decode_op, "num_splits", lambda *args: splits)
    args = _decode_args((160, 0, 1, 17, 97), device, page=page, per_row=per_row)
    got = mla_decode(*args, scale=0.3)
    exact = [x.double() if x.is_floating_point() else x for x in args]
    assert relative_error(got, decode_reference(*exact, scale=0.3)) < 1e-5
    assert not got[1].any()


def test_decode_follows_no_entry_past_the_length(device):
    q, rope, pages, table, lengths = _decode_args((6, 9), device)
    expected = mla_decode(q, rope, pages, table, lengths, scale=0.3)
    used = set(table[0, :2].tolist()) | set(table[1, :3].tolist())
    for page in set(range(len(pages))) - used:
        pages[page] = float("nan")
    pages[table[0, 1], 2:] = float("nan")
    pages[table[1, 2], 1:] = float("nan")
    table[0, 2:], table[1, 3:] = -1, 2**30
    assert torch.equal(mla_decode(q, rope, pages, table, lengths, scale=0.3), expected)


def test_decode_takes_32_bit_tables_strided_lengths_and_a_column_of_pages(device):
    q, rope, pages, table, lengths = _decode_args((6, 9), device)
    expected = mla_decode(q, rope, pages, table, lengths, scale=0.3)
    both = torch.stack((lengths, lengths - 5), dim=1)[:, 0]
    layers = torch.stack((torch.full_like(pages, float("nan")), pages), dim=1)[:, 1]
    got = mla_decode(q, rope, layers, table.int(), both, scale=0.3)
    assert torch.equal(got, expected)


def test_decode_pieces_follow_from_shapes(device):
    cpu = torch.device("cpu")
    assert num_splits(1, 100, cpu) == 4
    assert num_splits(1, 2, cpu) == 2
    assert num_splits(64, 100, cpu) == 1


def test_decode_errors(device):
    q, rope, pages, table, lengths = _decode_args((6, 9), device)
    with pytest.raises(ValueError, match=r"32 \+ 8"):
        mla_decode(q, rope, pages[..., :36], table, lengths, scale=1.0)
    with pytest.raises(ValueError, match=r"\[1, 2\] rows"):
        mla_decode(q, rope, pages, table, lengths[:1], scale=1.0)
