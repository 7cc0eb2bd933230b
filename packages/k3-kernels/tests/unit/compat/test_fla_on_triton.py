"""fla's calls that are ops of K3, on the Triton kernels: interpreted here, compiled on a GPU."""

import pytest
import torch

from k3_core.testing import relative_error
from k3_kernels.compat.fla import choose
from k3_kernels.compat.fla.attnres import fused_attnres
from k3_kernels.compat.fla.conv import causal_conv1d
from k3_kernels.compat.fla.kda import chunk_kda, fused_recurrent_kda_fwd
from k3_kernels.compat.fla.norm_gated import rms_norm_gated

pytest.importorskip("triton")

TOLERANCE = 2e-5


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def on_triton(monkeypatch, device):
    """Runs a function once by the default implementations and once by the kernels."""

    def compare(function, *tensors):
        used = []
        results = []
        for is_triton in (False, True):
            if is_triton:
                monkeypatch.setattr(choose, "_resolved", lambda op, *_: used.append(op) or load(op))
            own = [tensor.clone().to(device) for tensor in tensors]
            with torch.no_grad():
                results.append([*function(*own), *own])
        for a, b in zip(results[1], results[0], strict=True):
            assert relative_error(a, b) < TOLERANCE
        return used

    return compare


def load(op):
    module = __import__(f"k3_kernels.{op}.op", fromlist=[op])
    return getattr(module, op)


RAW = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "lower_bound": -5.0,
}


def heads(batch, tokens, dim=16):
    """q, k with 2 heads, v, g, beta with 4, A_log and dt_bias."""
    shapes = ((2, dim), (2, dim), (4, dim), (4, dim), (4,))
    drawn = [randn(batch, tokens, *shape, seed=i) for i, shape in enumerate(shapes)]
    return [*drawn, 0.3 * randn(4, seed=6), randn(4 * dim, seed=7)]


def test_chunk_kda(on_triton):
    def run(q, k, v, g, beta, A_log, dt_bias, state):
        parameters = {"A_log": A_log, "dt_bias": dt_bias}
        return chunk_kda(q, k, v, g, beta, None, state, True, **RAW, **parameters)

    assert on_triton(run, *heads(2, 35), randn(2, 4, 16, 16, seed=8)) == ["kda_chunk"]


def test_chunk_kda_gives_the_states_between_chunks(on_triton):
    def run(q, k, v, g, beta, A_log, dt_bias, state):
        named = {"A_log": A_log, "dt_bias": dt_bias, "return_intermediate_states": True}
        return chunk_kda(q, k, v, g, beta, None, state, True, **RAW, **named, chunk_size=32)

    assert on_triton(run, *heads(2, 70), randn(2, 4, 16, 16, seed=8)) == ["kda_chunk"]


def test_decode_on_a_pool(on_triton, device):
    slots = torch.tensor([2, -1, 0], device=device)

    def run(q, k, v, g, beta, A_log, dt_bias, pool):
        named = {"initial_state": pool, "state_v_first": True, "ssm_state_indices": slots}
        return fused_recurrent_kda_fwd(q, k, v, g, beta, A_log, dt_bias, **named, **RAW)

    assert on_triton(run, *heads(1, 3), randn(4, 4, 16, 16, seed=8)) == ["kda_step"]


def test_convolution_with_states(on_triton, device):
    cu = torch.tensor([0, 5, 6, 11], device=device)

    def run(x, weight, state):
        return causal_conv1d(
            x, weight, None, None, state, True, "swish", cu_seqlens=cu, cu_seqlens_cpu=cu.cpu()
        )

    args = randn(1, 11, 24), randn(24, 4, seed=1), randn(3, 24, 4, seed=2)
    assert on_triton(run, *args) == ["short_conv"]


def test_gated_norm(on_triton):
    def run(x, g, weight):
        return [rms_norm_gated(x, g, weight, None, "sigmoid")]

    args = randn(2, 3, 4, 16), randn(2, 3, 4, 16, seed=1), randn(16, seed=2)
    assert on_triton(run, *args) == ["gated_rms_norm"]


def test_attnres(on_triton):
    def run(query, weight, output, *sources):
        return [fused_attnres(query, sources, weight, output, scale=0.25)]

    weights = [randn(48, seed=i) for i in range(3)]
    assert on_triton(run, *weights, *(randn(2, 3, 48, seed=i) for i in range(3, 6))) == ["attn_res"]
