"""mla_decode in plain torch against the reference, over pages in any order and of any content."""

import pytest
import torch

from k3_core.ops.mla_decode import reference
from k3_kernels.mla_decode import cpu

H, C, R, PAGE, PAGES = 2, 5, 2, 3, 40


def call(op, lengths, page=PAGE, dtype=torch.float64, rest=None):
    """`rest` is what stands in the pages behind the tokens."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    per_row = max(1, -(-max(lengths, default=0) // page))
    table = torch.randperm(PAGES, generator=generator)[: len(lengths) * per_row]
    table = table.view(len(lengths), per_row)
    q_latent, q_rope, pages = rand(len(lengths), H, C), rand(len(lengths), H, R), None
    pages = rand(PAGES, page, C + R)
    if rest is not None:
        used = torch.zeros(PAGES, page, dtype=torch.bool)
        for row, length in zip(table, lengths, strict=True):
            tokens = torch.zeros(per_row * page, dtype=torch.bool)
            tokens[:length] = True
            used[row] = tokens.view(per_row, page)
        pages[~used] = rest
    return op.mla_decode(q_latent, q_rope, pages, table, torch.tensor(lengths).long(), scale=0.3)


@pytest.mark.parametrize("lengths", [(7, 0, 4), (3, 3), (0, 0), (1,), (9, 1, 6, 2), ()])
@pytest.mark.parametrize("page", [1, 3, 16])
def test_any_lengths(lengths, page):
    found, expected = call(cpu, lengths, page), call(reference, lengths, page)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rest", [float("nan"), float("inf")])
def test_what_stands_behind_the_tokens_is_not_read(rest):
    found = call(cpu, (7, 0, 4), rest=rest)
    assert torch.equal(found, call(cpu, (7, 0, 4), rest=0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_computed_in_float32(dtype):
    found = call(cpu, (7, 0, 4), dtype=dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, call(reference, (7, 0, 4), dtype=dtype))


def test_widths_that_do_not_fit_are_named():
    table, lengths = torch.zeros(1, 1).long(), torch.ones(1).long()
    with pytest.raises(ValueError, match="pages hold 8 values"):
        cpu.mla_decode(
            torch.zeros(1, H, C), torch.zeros(1, H, R), torch.zeros(1, PAGE, 8), table, lengths,
            scale=1.0,
        )  # fmt: skip
