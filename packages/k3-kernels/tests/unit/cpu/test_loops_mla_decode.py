"""mla_decode as loops: pages in any order and of any content, strides, rows alone, bad pages."""

import pytest
import torch

from k3_core.ops.mla_decode import reference
from k3_core.testing import relative_error
from k3_kernels.loops import MAX_TOKENS
from k3_kernels.mla_decode import loops

H, C, R, PAGE, PAGES = 5, 19, 6, 3, 40


def make(lengths, page=PAGE, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    rows, per_row = len(lengths), max(1, -(-max(lengths, default=0) // page))
    table = torch.randperm(PAGES, generator=generator)[: rows * per_row].view(rows, per_row)
    queries = rand(rows, H, C), rand(rows, H, R)
    return [*queries, rand(PAGES, page, C + R), table, torch.tensor(lengths).long()]


def call(*args):
    return loops.mla_decode(*args, scale=0.3)


def expected(*args):
    exact = [x.double() if x.is_floating_point() else x for x in args]
    return reference.mla_decode(*exact, scale=0.3)


@pytest.fixture
def only_loops(monkeypatch):
    """Makes a call that loops do not take an error."""
    monkeypatch.setattr(loops, "cpu", None)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("lengths", [(7, 0, 4), (3, 3), (0, 0), (1,), (9, 1, 6, 2), ()])
@pytest.mark.parametrize("page", [1, 3, 16])
def test_any_lengths(lengths, page, dtype, tolerance, only_loops):
    args = make(lengths, page, dtype)
    got = call(*args)
    assert got.dtype == dtype
    assert relative_error(got, expected(*args)) < tolerance


def test_any_strides(only_loops):
    q_latent, q_rope, pages, table, lengths = make((7, 2, 5))
    joined = torch.cat((q_latent, q_rope), dim=-1)
    by_head = q_latent.transpose(0, 1).contiguous().transpose(0, 1)
    wide_pages = torch.stack((pages, pages * 2), dim=1)[:, 1]
    every_second = q_rope.repeat_interleave(2, -1)[..., ::2]
    tables = table.mT.contiguous().mT, lengths.repeat_interleave(2)[::2]
    plain = call(q_latent, q_rope, pages * 2, table, lengths)
    for latent, rope in ((joined[..., :C], joined[..., C:]), (by_head, every_second)):
        assert torch.equal(call(latent, rope, wide_pages, *tables), plain)


def test_a_row_alone_is_the_same(only_loops):
    args = make((7, 0, 4, 9))
    got = call(*args)
    for b in range(4):
        q_latent, q_rope, table, lengths = (args[i][b : b + 1] for i in (0, 1, 3, 4))
        table = table[:, : max(1, -(-int(lengths) // PAGE))]
        assert torch.equal(call(q_latent, q_rope, args[2], table, lengths), got[b : b + 1])


@pytest.mark.parametrize("rest", [float("nan"), float("inf")])
def test_what_stands_behind_the_tokens_is_not_read(rest, only_loops):
    args = make((7, 0, 4))
    clean, used = call(*args), torch.zeros(PAGES, PAGE, dtype=torch.bool)
    for row, length in zip(args[3], args[4].tolist(), strict=True):
        tokens = torch.zeros(len(row) * PAGE, dtype=torch.bool)
        tokens[:length] = True
        used[row] = tokens.view(-1, PAGE)
    args[2][~used] = rest
    args[3][1] = 10**6  # entries of a row without tokens are not followed either
    assert torch.equal(call(*args), clean)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_query_that_is_not_finite_stays_in_its_row(value, only_loops):
    args = make((7, 3, 4))
    clean = call(*args)
    args[0][1, 2, 0] = value
    got = call(*args)
    torch.testing.assert_close(got.double(), expected(*args), rtol=1e-5, atol=1e-6)
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


def test_scores_of_any_size(only_loops):
    """No exponential overflows: the largest score of a row is taken off."""
    args = make((7, 3, 4))
    args[0] *= 1e4
    assert relative_error(call(*args), expected(*args)) < 1e-3


def test_lengths_outside_the_table(only_loops):
    args = make((7, 4))
    args[4] = torch.tensor([-2, 100])
    assert relative_error(call(*args), expected(*args)) < 1e-6


@pytest.mark.parametrize("bad", [PAGES, 2**40, -PAGES - 1])
def test_a_page_that_does_not_exist_is_an_error(bad):
    args = make((7, 4))
    args[3][1, 1] = bad
    with pytest.raises(IndexError):
        call(*args)


def test_pages_counted_from_the_end_are_those_of_torch():
    args = make((7, 4))
    args[3][0] -= PAGES
    assert relative_error(call(*args), expected(*args)) < 1e-6


def test_what_is_left_to_torch(monkeypatch):
    calls = []
    monkeypatch.setattr(loops.cpu, "mla_decode", lambda *args, **named: calls.append(args))

    def is_left(*args):
        calls.clear()
        call(*args)
        return bool(calls)

    q_latent, q_rope, pages, table, lengths = make((7, 2))
    assert not is_left(q_latent, q_rope, pages, table, lengths)
    assert is_left(q_latent, q_rope, pages.double(), table, lengths)
    assert is_left(q_latent, q_rope, pages.mT.contiguous().mT, table, lengths)
    assert is_left(q_latent, q_rope, pages, table.int(), lengths)
    assert is_left(q_latent, q_rope, pages, table, lengths.int())
    assert is_left(q_latent, q_rope, pages[..., :8], table, lengths)
    assert is_left(q_latent, q_rope, pages, table[:1], lengths)
    assert is_left(q_latent, q_rope[:1], pages, table, lengths)
    for rows in (MAX_TOKENS, MAX_TOKENS + 1):
        many = [x[:1].expand(rows, *x.shape[1:]) for x in (q_latent, q_rope, table, lengths)]
        assert is_left(*many[:2], pages, *many[2:]) == (rows > MAX_TOKENS)
    monkeypatch.setattr(loops, "MAX_QUERIES", H * (C + R) - 1)
    assert is_left(q_latent, q_rope, pages, table, lengths)


def test_widths_that_do_not_fit_are_named():
    args = make((7,))
    with pytest.raises(ValueError, match="pages hold 8 values"):
        call(*args[:2], args[2][..., :8], *args[3:])
