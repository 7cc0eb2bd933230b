"""Properties of Per-Head Muon (training 3.4), against an iteration written out in float64.

H heads, r rows of a head, c columns.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from k3_core.ops.newton_schulz.reference import newton_schulz
from k3_train.optim import per_head_muon
from k3_train.optim.per_head_muon import PerHeadMuon, update_scale
from k3_train.optim.roles import Role

LR, MOMENTUM, DECAY = 0.1, 0.95, 0.1


def oracle_orthogonalise(matrix):
    """Five quintic Newton-Schulz steps of one matrix, numpy float64 (report 5)."""
    x = matrix / (np.linalg.norm(matrix) + 1e-7)
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def heads_role(num_heads, rows):
    return Role("heads", "muon", True, num_heads, (rows,))


def make(weight, role, grad, decay=DECAY, **options):
    param = Parameter(weight.clone())
    param.grad = grad.clone()
    muon = PerHeadMuon(
        {"w": param},
        {"w": role},
        newton_schulz=newton_schulz,
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=decay,
        **options,
    )
    return muon, param


def update(role, grad, decay=0.0):
    """The change of a zero weight by one step."""
    muon, param = make(torch.zeros_like(grad), role, grad, decay)
    muon.step(1.0)
    return param.detach()


shapes = st.tuples(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 6), st.integers(1, 8))


def draw(seed, num_heads, rows, columns):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_heads * rows, columns, generator=generator, dtype=torch.float64)


@given(shapes, st.lists(st.sampled_from([0.5, 1.0, 0.0]), min_size=1, max_size=3))
def test_equals_a_loop_over_heads_and_steps(shape, factors):
    seed, num_heads, rows, columns = shape
    weight = draw(seed, num_heads, rows, columns)
    role = heads_role(num_heads, rows)
    muon, param = make(weight, role, weight)
    want, momentum = weight.numpy().copy(), np.zeros(weight.shape)
    for index, factor in enumerate(factors):
        grad = draw(seed + index + 1, num_heads, rows, columns)
        param.grad = grad.clone()
        muon.step(factor)
        momentum = MOMENTUM * momentum + grad.numpy()
        nesterov = grad.numpy() + MOMENTUM * momentum
        want *= 1 - LR * factor * DECAY
        for head in range(num_heads):
            block = slice(head * rows, (head + 1) * rows)
            scale = LR * factor * 0.2 * math.sqrt(max(rows, columns))
            want[block] -= scale * oracle_orthogonalise(nesterov[block])
    np.testing.assert_allclose(param.detach().numpy(), want, atol=1e-9)
    np.testing.assert_allclose(muon.state_tensors()["momentum.w"].numpy(), momentum, atol=1e-12)


@given(shapes, st.randoms())
def test_permuting_heads_permutes_the_update(shape, random):
    seed, num_heads, rows, columns = shape
    grad = draw(seed, num_heads, rows, columns)
    order = random.sample(range(num_heads), num_heads)
    role = heads_role(num_heads, rows)
    plain = update(role, grad).view(num_heads, rows, columns)
    permuted = update(role, grad.view(num_heads, rows, columns)[order].flatten(0, 1))
    torch.testing.assert_close(permuted.view_as(plain), plain[order], atol=1e-10, rtol=0)


@given(shapes, st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=4))
def test_scaling_the_gradient_of_a_head_changes_nothing(shape, scales):
    seed, num_heads, rows, columns = shape
    grad = draw(seed, num_heads, rows, columns)
    scale_H = torch.tensor(scales[:num_heads], dtype=torch.float64)
    scaled = (grad.view(num_heads, rows, columns) * scale_H[:, None, None]).flatten(0, 1)
    role = heads_role(num_heads, rows)
    torch.testing.assert_close(update(role, scaled), update(role, grad), atol=2e-4, rtol=0)


def test_whole_matrix_muon_is_not_invariant_to_the_scale_of_a_head():
    grad = draw(0, 4, 8, 16)
    scaled = grad.clone()
    scaled[:8] *= 100
    role = heads_role(1, 32)
    assert (update(role, scaled) - update(role, grad)).abs().max() > 1e-2


@given(shapes)
def test_one_head_is_plain_muon(shape):
    seed, _, rows, columns = shape
    grad = draw(seed, 1, rows, columns)
    want = -LR * 0.2 * math.sqrt(max(rows, columns)) * oracle_orthogonalise(1.95 * grad.numpy())
    np.testing.assert_allclose(update(heads_role(1, rows), grad).numpy(), want, atol=1e-9)


@pytest.mark.parametrize(("rows", "columns"), [(32, 192), (64, 64), (192, 48)])
def test_update_has_the_rms_of_the_block_shape(rows, columns):
    rms = update(heads_role(4, rows), draw(0, 4, rows, columns)).view(4, -1).pow(2).mean(1).sqrt()
    ideal = LR * 0.2 * math.sqrt(max(rows, columns)) * math.sqrt(min(rows, columns))
    ideal /= math.sqrt(rows * columns)
    assert ((rms > 0.7 * ideal) & (rms < 1.2 * ideal)).all()


def test_kv_rows_of_a_head_are_orthogonalised_apart():
    role = Role("mla_kv", "muon", True, 2, (3, 5))
    grad = draw(0, 2, 8, 6)
    got = update(role, grad).view(2, 8, 6).numpy()
    blocks = 1.95 * grad.view(2, 8, 6).numpy()
    scale = -LR * 0.2 * math.sqrt(6)
    for head in range(2):
        for part in (slice(0, 3), slice(3, 8)):
            want = scale * oracle_orthogonalise(blocks[head, part])
            np.testing.assert_allclose(got[head, part], want, atol=1e-9)


def test_a_zero_gradient_only_decays():
    weight = draw(0, 2, 3, 5)
    muon, param = make(weight, heads_role(2, 3), torch.zeros_like(weight))
    muon.step(1.0)
    assert torch.equal(param.detach(), weight * (1 - LR * DECAY))


def test_a_missing_gradient_touches_nothing():
    weight = draw(0, 2, 3, 5)
    muon, param = make(weight, heads_role(2, 3), weight)
    param.grad = None
    muon.step(1.0)
    assert torch.equal(param.detach(), weight)
    assert not muon.state_tensors()["momentum.w"].any()


def test_parameters_of_one_block_shape_do_not_mix():
    wide, tall = draw(1, 3, 4, 8), draw(2, 1, 8, 4)
    params = {"wide": Parameter(torch.zeros_like(wide)), "tall": Parameter(torch.zeros_like(tall))}
    params["wide"].grad, params["tall"].grad = wide.clone(), tall.clone()
    roles = {"wide": heads_role(3, 4), "tall": heads_role(1, 8)}
    PerHeadMuon(
        params, roles, newton_schulz=newton_schulz, lr=LR, momentum=MOMENTUM, weight_decay=0.0
    ).step(1.0)
    for name, grad in (("wide", wide), ("tall", tall)):
        torch.testing.assert_close(
            params[name].detach(), update(roles[name], grad), atol=1e-12, rtol=0
        )


@given(shapes, st.integers(0, 4))
def test_heads_sharded_between_two_owners_equal_the_gathered_update(shape, cut):
    """Whoever owns whole heads needs nothing of the others (training 5, row 2)."""
    seed, num_heads, rows, columns = shape
    cut = min(cut, num_heads)
    grad = draw(seed, num_heads, rows, columns)
    parts = [grad[: cut * rows], grad[cut * rows :]]
    sharded = [update(heads_role(len(part) // rows, rows), part) for part in parts if len(part)]
    torch.testing.assert_close(
        torch.cat(sharded), update(heads_role(num_heads, rows), grad), atol=1e-10, rtol=0
    )


def test_a_shard_that_cuts_a_head_cannot_be_orthogonalised_alone():
    grad = draw(0, 2, 8, 16)
    cut = 5
    sharded = [update(heads_role(1, len(part)), part) for part in (grad[:cut], grad[cut:8])]
    assert (torch.cat(sharded) - update(heads_role(2, 8), grad)[:8]).abs().max() > 1e-2


def test_large_parameters_are_updated_alone_to_the_same_result(monkeypatch):
    shape, other = (0, 3, 4, 8), (1, 2, 8, 4)
    roles = {name: heads_role(3, 4) for name in ("first", "third")}
    roles["second"] = heads_role(2, 8)
    results = []
    for large in (1, 1 << 60):
        monkeypatch.setattr(per_head_muon, "LARGE", large)
        drawn = {"first": draw(*shape), "second": draw(*other), "third": draw(*shape).flip(0)}
        params = {name: Parameter(value) for name, value in drawn.items()}
        for param in params.values():
            param.grad = param.detach().sin()
        muon = PerHeadMuon(
            params, roles, newton_schulz=newton_schulz, lr=LR, momentum=0.9, weight_decay=0.1
        )
        muon.step(1.0)
        muon.step(0.5)
        results.append([*params.values(), *muon.state_tensors().values()])
    for alone, together in zip(*results, strict=True):
        torch.testing.assert_close(alone, together, atol=1e-12, rtol=0)


def test_the_iteration_works_in_the_dtype_that_it_is_given():
    grad = draw(0, 3, 8, 16).float()
    dtypes = []

    def iterate(blocks):
        dtypes.append(blocks.dtype)
        return newton_schulz(blocks)

    muon, param = make(torch.zeros_like(grad), heads_role(3, 8), grad, 0.0, dtype=torch.bfloat16)
    muon.newton_schulz = iterate
    muon.step(1.0)
    assert dtypes == [torch.bfloat16]
    assert (param.dtype, muon.buffers["w"].dtype) == (torch.float32, torch.float32)
    want = update(heads_role(3, 8), grad)
    assert torch.nn.functional.cosine_similarity(param.flatten(), want.flatten(), dim=0) > 0.999


@pytest.mark.parametrize(("rows", "columns"), [(32, 192), (64, 64), (192, 48)])
def test_the_scale_is_the_chosen_rule_of_the_block_shape(rows, columns):
    assert update_scale("match_rms_adamw", rows, columns) == 0.2 * math.sqrt(max(rows, columns))
    assert update_scale("original", rows, columns) == max(1.0, math.sqrt(rows / columns))
    role, grad = heads_role(2, rows), draw(0, 2, rows, columns)
    updates = []
    for scale in ("match_rms_adamw", "original"):
        muon, param = make(torch.zeros_like(grad), role, grad, 0.0, scale=scale)
        muon.step(1.0)
        updates.append(param.detach() / update_scale(scale, rows, columns))
    torch.testing.assert_close(*updates)


def test_a_checkpoint_of_another_scale_is_refused():
    weight = draw(0, 2, 3, 5)
    saved = make(weight, heads_role(2, 3), weight)[0].state_tensors()
    assert saved["scales"].tolist() == [0.2 * math.sqrt(5)]
    for changed in (
        make(weight, heads_role(2, 3), weight, scale="original")[0],
        make(weight, heads_role(1, 6), weight)[0],
    ):
        with pytest.raises(ValueError, match=r"scaled otherwise than by optim\.muon_scale"):
            changed.load_state_tensors(saved)


def test_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match="'match_rms_adamw' or 'original'"):
        update_scale("spectral", 2, 3)
