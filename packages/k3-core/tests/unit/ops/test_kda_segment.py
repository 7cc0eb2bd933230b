"""kda_segment against the explicit product of token transitions (report 1.7)."""

import pytest
import torch

from k3_core.ops.kda_chunk.inputs import l2_normalize, log_decay
from k3_core.ops.kda_segment.reference import kda_segment
from k3_core.testing.values import Values

LENGTHS, H, K, V = (5, 0, 37), 2, 6, 4


def inputs():
    v = Values(torch.float64, "cpu")
    tokens = sum(LENGTHS)
    args = [v.act(tokens, H, K), v.act(tokens, H, V), v.act(tokens, H, K), v.act(tokens, H)]
    return [*args, v.full(H, scale=0.3), v.full(H, K)]


def by_products(k, v, gate, beta, A_log, dt_bias, lower_bound):
    """M = prod diag(alpha) (I - beta k k^T) and the state from zero, token by token and head."""
    k, g, beta = l2_normalize(k), log_decay(gate, A_log, dt_bias, lower_bound), beta.sigmoid()
    maps, states = [], []
    for rows in torch.arange(len(k)).split(LENGTHS):
        M = torch.eye(K, dtype=k.dtype).repeat(H, 1, 1)
        S = torch.zeros(H, V, K, dtype=k.dtype)
        for t in rows.tolist():
            for h in range(H):
                erase = torch.eye(K, dtype=k.dtype) - beta[t, h] * torch.outer(k[t, h], k[t, h])
                step = torch.diag(g[t, h].exp()) @ erase
                M[h] = M[h] @ step
                S[h] = S[h] @ step + beta[t, h] * torch.outer(v[t, h], k[t, h])
        maps.append(M)
        states.append(S)
    return torch.stack(maps), torch.stack(states)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_segments_are_products_of_token_maps(lower_bound):
    args = inputs()
    cu = torch.tensor((0, *LENGTHS)).cumsum(0)
    M, S = kda_segment(*args, lower_bound=lower_bound, cu_seqlens_N1=cu, seqlens=LENGTHS)
    expected = by_products(*args, lower_bound)
    torch.testing.assert_close((M, S), expected, rtol=0, atol=1e-11)
    assert torch.equal(M[1], torch.eye(K).double().expand(H, K, K)) and not S[1].any()


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gradients_of_both_parts_of_a_map(lower_bound):
    lengths = (3, 0, 4)
    v = Values(torch.float64, "cpu")
    args = [v.act(7, H, 3), v.act(7, H, 2), v.act(7, H, 3), v.act(7, H)]
    args += [v.full(H, scale=0.3), v.full(H, 3)]
    cu = torch.tensor((0, *lengths)).cumsum(0)

    def segment(*args):
        return kda_segment(*args, lower_bound=lower_bound, cu_seqlens_N1=cu, seqlens=lengths)

    assert torch.autograd.gradcheck(segment, [x.requires_grad_() for x in args])
