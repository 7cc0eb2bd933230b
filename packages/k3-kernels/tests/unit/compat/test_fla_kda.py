"""fla's KDA calls against the recurrence written out in float64, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from k3_core.testing import relative_error
from k3_kernels.compat.fla import kda_inputs
from k3_kernels.compat.fla.gate import fused_kda_gate, naive_kda_gate
from k3_kernels.compat.fla.kda import chunk_kda, fused_recurrent_kda, fused_recurrent_kda_fwd
from k3_kernels.compat.fla.naive import naive_chunk_kda, naive_recurrent_kda
from k3_kernels.compat.fla.peers import fwd

B, T, H, G, K, V = 2, 70, 2, 4, 8, 6
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0")


def draw(seed=0, groups=G, batch=B, tokens=T):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shapes = {"q": (H, K), "k": (H, K), "v": (groups, V), "g": (groups, K), "beta": (groups,)}
    x = {name: randn(batch, tokens, *shape) for name, shape in shapes.items()}
    return x | {
        "A_log": randn(groups) * 0.3,
        "dt_bias": randn(groups * K),
        "h0": randn(batch, groups, K, V),
    }


def to(x, dtype=torch.float32):
    return {name: value.to(dtype) for name, value in x.items()}


def recurrence(q, k, v, g, beta, h0, scale):
    """S <- diag(e^g) S; S <- S + beta k (v - S^T k)^T; o = scale S^T q; states [K, V]."""
    repeats = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
    state, outputs = h0, []
    for t in range(q.shape[1]):
        state = g[:, t].exp().unsqueeze(-1) * state
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], error)
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1), state


def activated(x, flags):
    """What fla's flags leave to the call, by its formulas in float64."""
    q, k, g, beta = x["q"], x["k"], x["g"], x["beta"]
    if flags.get("use_qk_l2norm_in_kernel"):
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    if flags.get("use_gate_in_kernel"):
        rate, z = x["A_log"].exp()[:, None], g + x["dt_bias"].view(-1, K)
        bound = flags.get("lower_bound")
        g = -rate * F.softplus(z) if bound is None else bound * torch.sigmoid(rate * z)
    if flags.get("use_beta_sigmoid_in_kernel"):
        beta = beta.sigmoid() * (2 if flags.get("allow_neg_eigval") else 1)
    return q, k, x["v"], g, beta


def given(x):
    """Inputs of a call without any flag: unit q and k, log decays, betas."""
    unit = {name: F.normalize(x[name], dim=-1) for name in ("q", "k")}
    return x | unit | {"g": F.logsigmoid(x["g"]), "beta": x["beta"].sigmoid()}


RAW = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
CASES = {
    "given": {},
    "raw": {**RAW, "lower_bound": -5.0, "safe_gate": True},
    "softplus": {**RAW},
    "negative": {**RAW, "allow_neg_eigval": True, "lower_bound": -5.0},
    "norms outside": {"use_gate_in_kernel": True, "lower_bound": -5.0},
    "scale": {"scale": 1.0},
}


def case(name):
    flags = CASES[name]
    x = draw()
    if not flags.get("use_qk_l2norm_in_kernel"):
        fixed = given(x)
        x |= {key: fixed[key] for key in ("q", "k", "beta")}
        if not flags.get("use_gate_in_kernel"):
            x["g"] = fixed["g"]
    return x, flags


def call(function, x, flags, **named):
    parameters = {n: x[n] for n in ("A_log", "dt_bias") if flags.get("use_gate_in_kernel")}
    args = (x[n] for n in ("q", "k", "v", "g", "beta"))
    state = {"initial_state": x["h0"], "output_final_state": True}
    return function(*args, **{**parameters, **state, **flags, **named})


@pytest.mark.parametrize("name", CASES)
def test_chunk_kda_values_and_gradients(name):
    x, flags = case(name)
    leaves = {n: v.requires_grad_() for n, v in x.items()}
    scale = flags.get("scale", K**-0.5)
    expected = recurrence(*activated(leaves, flags), leaves["h0"], scale)
    weights = [torch.randn_like(y) for y in expected]
    used = [n for n in NAMES if flags.get("use_gate_in_kernel") or n not in ("A_log", "dt_bias")]
    total = sum((y * w).sum() for y, w in zip(expected, weights, strict=True))
    wanted = torch.autograd.grad(total, [leaves[n] for n in used])

    own = {n: v.detach().float().requires_grad_() for n, v in x.items()}
    got = call(chunk_kda, own, flags)
    assert [y.dtype for y in got] == [torch.float32] * 2
    total = sum((y * w.float()).sum() for y, w in zip(got, weights, strict=True))
    found = torch.autograd.grad(total, [own[n] for n in used])
    for a, b in zip((*got, *found), (*expected, *wanted), strict=True):
        assert relative_error(a, b) < 2e-5


@pytest.mark.parametrize("name", ["given", "raw", "softplus"])
def test_fused_recurrent_kda_and_the_state_layouts(name):
    x, flags = case(name)
    expected, state = recurrence(*activated(x, flags), x["h0"], flags.get("scale", K**-0.5))
    own = to(x)
    rest = {n: f for n, f in flags.items() if n != "safe_gate"}
    o, final = call(fused_recurrent_kda, own, rest)
    turned = own | {"h0": own["h0"].mT.contiguous()}
    o_v, final_v = call(fused_recurrent_kda, turned, rest, state_v_first=True)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        o_old, _ = call(fused_recurrent_kda, turned, rest, transpose_state_layout=True)
    assert torch.equal(o, o_v) and torch.equal(o, o_old) and torch.equal(final, final_v.mT)
    assert relative_error(o, expected) < 1e-5 and relative_error(final, state) < 1e-5


def test_a_row_of_packed_sequences_and_a_gate_that_forgets_everything():
    x = given(draw(batch=1))
    x["g"][:, 30:40] = -1000.0
    cu = torch.tensor([0, 33, 33, 70])
    x["h0"] = torch.randn(3, G, K, V, dtype=torch.float64)
    pieces = [
        recurrence(*(x[n][:, a:b] for n in ("q", "k", "v", "g", "beta")), x["h0"][i : i + 1], 0.5)
        for i, (a, b) in enumerate(((0, 33), (33, 70)))
        for i in (i * 2,)
    ]
    o, final = call(chunk_kda, to(x), {"scale": 0.5}, cu_seqlens=cu, cu_seqlens_cpu=cu)
    assert relative_error(o, torch.cat([p[0] for p in pieces], dim=1)) < 1e-5
    assert relative_error(final[[0, 2]], torch.cat([p[1] for p in pieces])) < 1e-5
    assert torch.equal(final[1], to(x)["h0"][1])


def test_the_naive_forms_agree_with_the_recurrence():
    x = given(draw(tokens=64))
    expected = recurrence(*activated(x, {}), x["h0"], K**-0.5)
    for function in (naive_recurrent_kda, naive_chunk_kda):
        for a, b in zip(call(function, to(x), {}), expected, strict=True):
            assert relative_error(a, b) < 1e-5


def test_a_beta_of_zero_has_its_gradient():
    x = to(given(draw()))
    x["beta"][:, ::3] = 0.0
    leaves = {n: v.requires_grad_() for n, v in x.items()}
    exact = {n: v.detach().double().requires_grad_() for n, v in x.items()}
    o, _ = call(chunk_kda, leaves, {})
    expected, _ = recurrence(*activated(exact, {}), exact["h0"], K**-0.5)
    found = torch.autograd.grad(o.sum(), leaves["beta"])[0]
    wanted = torch.autograd.grad(expected.sum(), exact["beta"])[0]
    assert relative_error(found, wanted) < 2e-5


@torch.no_grad()
@pytest.mark.parametrize("name", ["given", "raw"])
def test_intermediate_states_are_those_between_chunks(name):
    x, flags = case(name)
    own = to(x)
    o, final, between = call(chunk_kda, own, flags, return_intermediate_states=True)
    assert between.shape == (B, 2, G, K, V) and torch.equal(between[:, 0], own["h0"])
    first = {n: own[n][:, :64] if n in ("q", "k", "v", "g", "beta") else own[n] for n in own}
    assert relative_error(between[:, 1], call(chunk_kda, first, flags)[1]) < 1e-6
    for a, b in zip((o, final), call(chunk_kda, own, flags), strict=True):
        assert relative_error(a, b) < 1e-5
    with torch.enable_grad(), pytest.raises(ValueError, match="no_grad"):
        call(chunk_kda, own, flags, return_intermediate_states=True)


def test_flash_kda_writes_its_outputs():
    x, flags = case("raw")
    x |= {n: x[n].repeat_interleave(G // H, dim=2) for n in ("q", "k")}
    own = to(x)
    state = own["h0"].mT.contiguous()
    out, final = torch.zeros_like(own["v"]), torch.zeros_like(state)
    args = (own[n] for n in ("q", "k", "v", "g", "beta"))
    fwd(*args, K**-0.5, out, own["A_log"], own["dt_bias"], -5.0, state, final)
    expected, expected_state = recurrence(*activated(x, flags), x["h0"], K**-0.5)
    assert relative_error(out, expected) < 1e-5
    assert relative_error(final.mT, expected_state) < 1e-5


def decode_inputs(tokens):
    """Rows of one packed row of B * tokens tokens, a pool of 5 slots in fla's layout."""
    x = given(draw(tokens=tokens))
    pool = torch.randn(5, G, K, V, dtype=torch.float64)
    packed = {n: x[n].flatten(0, 1)[None] for n in ("q", "k", "v", "g", "beta")}
    return x, packed, pool


@pytest.mark.parametrize("is_v_first", [False, True])
def test_decode_on_a_pool_touches_its_slots_only(is_v_first):
    x, packed, pool = decode_inputs(tokens=1)
    slots = torch.tensor([3, -1])
    own = pool.float().mT.contiguous() if is_v_first else pool.float()
    before = own.clone()
    o, state = fused_recurrent_kda_fwd(
        **to(packed),
        initial_state=own,
        cu_seqlens=torch.arange(3),
        ssm_state_indices=slots,
        state_v_first=is_v_first,
    )
    expected, final = recurrence(*activated(x, {}), pool[[3, 3]], K**-0.5)
    assert state is own and torch.equal(state[[0, 1, 2, 4]], before[[0, 1, 2, 4]])
    assert relative_error(o[:, :1], expected[:1]) < 1e-5 and not o[:, 1:].any()
    assert relative_error(own.mT[3] if is_v_first else own[3], final[0]) < 1e-5


def test_raw_decode_is_the_op_and_agrees_with_the_loop(monkeypatch):
    x, flags = case("raw")
    flags = {n: f for n, f in flags.items() if n != "safe_gate"}
    packed = {n: x[n][:, :1].flatten(0, 1)[None].float() for n in ("q", "k", "v", "g", "beta")}
    named = {"A_log": x["A_log"].float(), "dt_bias": x["dt_bias"].float(), **flags}
    named |= {"state_v_first": True, "ssm_state_indices": torch.tensor([4, 1])}
    pool = torch.randn(5, G, V, K)
    by_op, by_loop = pool.clone(), pool.clone()
    o, _ = fused_recurrent_kda_fwd(**packed, initial_state=by_op, **named)
    monkeypatch.setattr(kda_inputs.Flags, "is_raw", False)
    cu = torch.arange(3)
    o_loop, _ = fused_recurrent_kda_fwd(**packed, initial_state=by_loop, cu_seqlens=cu, **named)
    assert relative_error(o, o_loop) < 1e-5 and relative_error(by_op, by_loop) < 1e-5


def test_verify_starts_from_the_last_accepted_token_and_keeps_every_state():
    x, packed, pool = decode_inputs(tokens=2)
    slots = torch.tensor([[0, 1], [2, 3]])
    named = {"cu_seqlens": torch.tensor([0, 2, 4]), "ssm_state_indices": slots}
    named |= {"num_accepted_tokens": torch.tensor([2, 1])}
    first, expected = pool[[1, 2]], []
    for t in range(2):
        one = (x[n][:, t : t + 1] for n in ("q", "k", "v", "g", "beta"))
        o, first = recurrence(*one, first, K**-0.5)
        expected.append((o, first))
    own = pool.float()
    o, _ = fused_recurrent_kda_fwd(**to(packed), initial_state=own, **named)
    wanted = torch.cat([o for o, _ in expected], dim=1).flatten(0, 1)
    assert relative_error(o[0], wanted) < 1e-5
    for t in range(2):
        assert relative_error(own[slots[:, t]], expected[t][1]) < 1e-5
    kept = pool.float()
    _, after = fused_recurrent_kda_fwd(
        **to(packed), initial_state=kept, inplace_final_state=False, **named
    )
    assert torch.equal(kept, pool.float())
    assert torch.equal(after.view(2, 2, G, K, V).transpose(0, 1), own[slots.T])


def test_the_gate_has_its_gradient_where_it_saturates():
    g = torch.tensor([[[12.0, -30.0], [4.0, 0.5]]], requires_grad=True)
    A_log = torch.tensor([0.1, 0.2], requires_grad=True)
    exact, exact_A = (x.detach().double().requires_grad_() for x in (g, A_log))
    fused_kda_gate(g, A_log, None, -5.0).sum().backward()
    z = exact_A.exp()[:, None] * exact
    (-5.0 * torch.sigmoid(z)).sum().backward()
    torch.testing.assert_close(g.grad.double(), exact.grad, rtol=1e-5, atol=0)
    torch.testing.assert_close(A_log.grad.double(), exact_A.grad, rtol=1e-5, atol=0)
    assert naive_kda_gate(g, A_log).dtype == torch.float32


ERRORS = {
    "chunk_size": ({"chunk_size": 16}, ValueError, "either 32 or 64"),
    "head_first": ({"head_first": True}, TypeError, "head_first"),
    "neg": ({"allow_neg_eigval": True}, ValueError, "use_beta_sigmoid_in_kernel"),
    "gate": ({"use_gate_in_kernel": True}, ValueError, "A_log"),
    "safe": ({"use_gate_in_kernel": True, "safe_gate": True}, ValueError, r"\[-5, 0\)"),
    "cp": ({"cp_context": object()}, NotImplementedError, "cp_context"),
    "graph": ({"use_graph": True}, NotImplementedError, "use_graph"),
    "rows": ({"cu_seqlens": torch.tensor([0, T])}, ValueError, "one row"),
    "state": ({"initial_state": torch.zeros(1, G, K, V)}, ValueError, "initial_state"),
    "state dtype": ({"initial_state": torch.zeros(B, G, K, V).half()}, ValueError, "float"),
    "beta": ({"beta": torch.zeros(B, T, G, V)}, ValueError, "beta has shape"),
    "heads": ({"v": torch.zeros(B, T, 3, V)}, ValueError, "do not divide"),
    "both names": (
        {"state_v_first": True, "transpose_state_layout": True},
        ValueError,
        "transpose_state_layout",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_fit_is_named(name):
    named, error, message = ERRORS[name]
    x = {n: v for n, v in to(given(draw())).items() if n in ("q", "k", "v", "g", "beta")}
    with pytest.raises(error, match=message):
        chunk_kda(**{**x, **named})
