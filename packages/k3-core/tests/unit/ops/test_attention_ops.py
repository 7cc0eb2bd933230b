"""mla_prefill, mla_decode, attn_res, gated_rms_norm and situ_glu against their formulas."""

import math

import pytest
import torch

from k3_core.ops.attn_res.reference import attn_res
from k3_core.ops.gated_rms_norm.reference import gated_rms_norm
from k3_core.ops.mla_decode.reference import mla_decode
from k3_core.ops.mla_prefill.reference import mla_prefill
from k3_core.ops.situ_glu.reference import situ_glu


def rand(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def attend(q, k, v, scale):
    """One query over its keys, number by number."""
    scores = [scale * float(q @ key) for key in k]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return sum(w * value for w, value in zip(weights, v, strict=True)) / sum(weights), top


def test_prefill_with_cached_keys_is_causal_at_the_end():
    lengths_q, lengths_k = (2, 0, 3), (5, 1, 3)
    q, k, v = rand(5, 2, 6), rand(9, 2, 6, seed=1), rand(9, 2, 4, seed=2)
    out, maxima = mla_prefill(
        q, k, v, scale=0.7, cu_seqlens_q=offsets(lengths_q), cu_seqlens_k=offsets(lengths_k),
        return_max=True,
    )  # fmt: skip
    tops = [[], []]
    for head in range(2):
        row = 0
        for start, num_q, num_k in ((0, 2, 5), (5, 0, 1), (6, 3, 3)):
            for i in range(num_q):
                stop = start + num_k - num_q + i + 1
                expected, top = attend(q[row, head], k[start:stop, head], v[start:stop, head], 0.7)
                torch.testing.assert_close(out[row, head], expected)
                tops[head].append(top)
                row += 1
    assert maxima.tolist() == pytest.approx([max(t) for t in tops])


def test_prefill_refuses_more_queries_than_keys():
    with pytest.raises(ValueError, match="at least as many keys"):
        mla_prefill(
            rand(2, 1, 4), rand(1, 1, 4), rand(1, 1, 4), scale=1.0,
            cu_seqlens_q=offsets([2]), cu_seqlens_k=offsets([1]),
        )  # fmt: skip


def test_decode_over_shuffled_pages_equals_one_query_of_attention():
    """Latents in three-token pages, out of order, with garbage beyond each length."""
    latent, rope, lengths = 5, 2, [7, 0, 4]
    pages = torch.full((6, 3, latent + rope), 1e6, dtype=torch.float64)
    table = torch.tensor([[4, 0, 2], [5, 5, 5], [1, 3, 5]])
    tokens = [rand(n, latent + rope, seed=i) for i, n in enumerate(lengths)]
    for row, rows in enumerate(tokens):
        for position, token in enumerate(rows):
            pages[table[row, position // 3], position % 3] = token
    q_latent, q_rope = rand(3, 2, latent, seed=7), rand(3, 2, rope, seed=8)
    out = mla_decode(q_latent, q_rope, pages, table, torch.tensor(lengths), scale=0.3)
    assert (out[1] == 0).all()
    for row in (0, 2):
        for head in range(2):
            query = torch.cat((q_latent[row, head], q_rope[row, head]))
            expected, _ = attend(query, tokens[row], tokens[row][:, :latent], 0.3)
            torch.testing.assert_close(out[row, head], expected)


def test_attn_res_is_a_softmax_over_depth():
    values = [rand(3, 8, seed=i) * 3 for i in range(4)]
    norm, proj = rand(8, seed=9), rand(1, 8, seed=10)
    out = attn_res(values, norm, proj, eps=1e-5)
    for token in range(3):
        keys = [v[token] / math.sqrt(float((v[token] ** 2).mean()) + 1e-5) * norm for v in values]
        expected, _ = attend(proj[0], keys, [v[token] for v in values], 1.0)
        torch.testing.assert_close(out[token], expected)


def test_zero_queries_average_the_sources():
    values = [rand(3, 8, seed=i) for i in range(5)]
    out = attn_res(values, torch.ones(8), torch.zeros(1, 8), eps=1e-5)
    torch.testing.assert_close(out, torch.stack(values).mean(0))


def test_gated_rms_norm_norms_first():
    x, weight, gate = rand(2, 3, 4), rand(4, seed=1), rand(2, 3, 4, seed=2)
    out = gated_rms_norm(x, weight, gate, eps=1e-5)
    row = x[1, 2]
    normed = row / math.sqrt(float((row**2).mean()) + 1e-5) * weight
    torch.testing.assert_close(out[1, 2], normed / (1 + (-gate[1, 2]).exp()))


def test_situ_glu_caps_and_derivative():
    gate = torch.linspace(-200, 200, 4001, dtype=torch.float64)
    assert float(situ_glu(gate, gate, beta=4.0, linear_beta=25.0).abs().max()) <= 100
    small = torch.tensor([1e-4], dtype=torch.float64)
    swiglu = small * torch.sigmoid(small) * small
    torch.testing.assert_close(situ_glu(small, small, beta=4.0, linear_beta=25.0), swiglu)
    g, u = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (1.3, -7.0))
    grads = torch.autograd.grad(situ_glu(g, u, beta=4.0, linear_beta=25.0), (g, u))
    t, s = math.tanh(1.3 / 4), 1 / (1 + math.exp(-1.3))
    up, d_up = 25 * math.tanh(-7 / 25), 1 - math.tanh(-7 / 25) ** 2
    assert float(grads[0]) == pytest.approx(((1 - t * t) * s + 4 * t * s * (1 - s)) * up)
    assert float(grads[1]) == pytest.approx(4 * t * s * d_up)
