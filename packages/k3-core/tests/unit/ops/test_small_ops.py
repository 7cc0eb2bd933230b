"""moe_experts, newton_schulz and linear_cross_entropy against their definitions."""

import math

import pytest
import torch
from torch.nn import functional as F

from k3_core.ops.linear_cross_entropy.reference import linear_cross_entropy
from k3_core.ops.moe_experts.reference import moe_experts
from k3_core.ops.newton_schulz.reference import newton_schulz
from k3_core.quant import MXTensor


def rand(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def silu_glu(gate, up):
    return F.silu(gate) * up


def test_experts_one_token_and_route_at_a_time():
    x, w1, w3, w2 = rand(5, 4), rand(6, 3, 4, seed=1), rand(6, 3, 4, seed=2), rand(6, 4, 3, seed=3)
    idx = torch.tensor([[0, 1], [5, 0], [2, 5], [5, 2], [0, 2]])  # experts 3 and 4 get nothing
    weight = rand(5, 2, seed=4)
    out = moe_experts(x, idx, weight, w1, w3, w2, activation=silu_glu)
    for token in range(5):
        expected = torch.zeros(4, dtype=torch.float64)
        for expert, scale in zip(idx[token], weight[token], strict=True):
            hidden = silu_glu(w1[expert] @ x[token], w3[expert] @ x[token])
            expected += scale * (w2[expert] @ hidden)
        torch.testing.assert_close(out[token], expected)


@pytest.mark.parametrize("bad", [-1, 6])
def test_an_expert_that_does_not_exist_is_an_error(bad):
    """A negative index must not wrap to the last expert."""
    idx = torch.tensor([[0, bad]])
    with pytest.raises(ValueError, match=r"allowed are 0\.\.5"):
        moe_experts(
            rand(1, 4), idx, rand(1, 2), rand(6, 3, 4), rand(6, 3, 4), rand(6, 4, 3),
            activation=silu_glu,
        )  # fmt: skip


def test_an_expert_without_tokens_gets_no_gradient():
    stacks = [rand(4, 3, 4).requires_grad_(), rand(4, 3, 4).requires_grad_()]
    down = rand(4, 4, 3).requires_grad_()
    idx = torch.tensor([[0, 2], [2, 0]])
    out = moe_experts(rand(2, 4), idx, rand(2, 2), *stacks, down, activation=silu_glu)
    out.sum().backward()
    for stack in (*stacks, down):
        assert (stack.grad[[1, 3]] == 0).all()
        assert (stack.grad[[0, 2]] != 0).any()


def test_packed_stacks_count_as_their_decoded_weights():
    generator = torch.Generator().manual_seed(0)

    def packed(*shape):
        data = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=generator)
        scale = torch.randint(120, 130, (*shape[:-1], shape[-1] // 32), generator=generator)
        return MXTensor(data.to(torch.uint8), scale.to(torch.uint8))

    stacks = [packed(3, 32, 64), packed(3, 32, 64), packed(3, 64, 32)]
    plain = [stack.dequantize(torch.float64) for stack in stacks]
    x, idx, weight = rand(4, 64), torch.tensor([[0, 2], [2, 1], [0, 1], [2, 0]]), rand(4, 2)
    outs = [moe_experts(x, idx, weight, *s, activation=silu_glu) for s in (stacks, plain)]
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4), (3, 5, 7)])
def test_newton_schulz_does_not_depend_on_scale_and_raises_small_singular_values(shape):
    matrices = rand(*shape)
    out = newton_schulz(matrices)
    singular = torch.linalg.svdvals(out)
    assert singular.max() < 1.3
    assert (singular[..., 0] - singular[..., -1]).max() < 1
    torch.testing.assert_close(newton_schulz(matrices * 1e3), out, rtol=1e-6, atol=1e-6)


def test_newton_schulz_applies_its_polynomial_to_the_singular_values():
    matrix = rand(4, 6)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = left @ values.diag() @ right
    torch.testing.assert_close(newton_schulz(matrix), expected, rtol=1e-5, atol=1e-5)


def test_newton_schulz_of_zero_is_zero():
    assert (newton_schulz(torch.zeros(2, 3, 4)) == 0).all()


def test_cross_entropy_by_hand_and_its_reductions():
    hidden, weight = rand(4, 3), rand(5, 3, seed=1)
    labels = torch.tensor([2, -100, 0, 4])
    logits = hidden @ weight.T
    losses = []
    for t, label in enumerate(labels.tolist()):
        if label < 0:
            losses.append(0.0)
            continue
        total = sum(math.exp(float(x)) for x in logits[t])
        losses.append(math.log(total) - float(logits[t, label]))
    each = linear_cross_entropy(hidden, weight, labels, reduction="none")
    summed = linear_cross_entropy(hidden, weight, labels, reduction="sum")
    assert each.tolist() == pytest.approx(losses)
    assert float(summed) == pytest.approx(sum(losses))
    assert float(linear_cross_entropy(hidden, weight, labels)) == pytest.approx(sum(losses) / 3)


def test_cross_entropy_of_ignored_labels_only_is_zero_with_a_zero_gradient():
    hidden = rand(2, 3).requires_grad_()
    loss = linear_cross_entropy(hidden, rand(5, 3), torch.full((2,), -100))
    loss.backward()
    assert float(loss.detach()) == 0 and (hidden.grad == 0).all()


@pytest.mark.parametrize("ignored", [-100, 3])
def test_cross_entropy_without_reduction_has_the_gradient_of_each_loss(ignored):
    """d logits = (softmax - one-hot) times what arrives, and nothing at ignored labels."""
    hidden, weight, upstream = rand(4, 3), rand(5, 3, seed=1), rand(4, seed=2)
    labels = torch.tensor([2, ignored, 0, 4])
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    each = linear_cross_entropy(*leaves, labels, ignore_index=ignored, reduction="none")
    found = torch.autograd.grad((each * upstream).sum(), leaves)
    error = torch.softmax(hidden.detach() @ weight.detach().T, -1)
    for row, label in enumerate(labels.tolist()):
        error[row, label if label >= 0 else 0] -= 1
        error[row] *= 0 if label == ignored else upstream[row]
    torch.testing.assert_close(found, (error @ weight.detach(), error.T @ hidden.detach()))


def test_a_label_beyond_the_vocabulary_is_an_error():
    with pytest.raises(IndexError, match="5"):
        linear_cross_entropy(rand(1, 3), rand(5, 3), torch.tensor([5]))
