"""Linears joined for inference: the same model, one product, and nothing lost for training."""

import copy

import torch

from k3_core import K3Config, K3ForConditionalGeneration
from k3_core.model.batch import SequenceBatch
from k3_core.modules import Linear, Projections, join


def tiny_model():
    generator = torch.Generator().manual_seed(0)
    config = K3Config.preset("k3-test")
    return K3ForConditionalGeneration(config, dtype=torch.float64, generator=generator).eval()


def logits_of(model, ids):
    return model.forward_packed(ids, SequenceBatch.from_lengths([len(ids)])).logits


def products(model, monkeypatch):
    """How many calls of the op `linear` are made."""
    counts, real = [], model.ops.linear
    monkeypatch.setattr(model.ops, "linear", lambda *a, **k: counts.append(1) or real(*a, **k))
    return counts


@torch.no_grad()
def test_a_joined_model_gives_the_same_logits_with_fewer_products(monkeypatch):
    model, ids = tiny_model(), torch.arange(7)
    counts = products(model, monkeypatch)
    expected, separate = logits_of(model, ids), len(counts)
    join(model)
    counts.clear()
    torch.testing.assert_close(logits_of(model, ids), expected, rtol=1e-12, atol=1e-12)
    held = [value for m in model.modules() for value in vars(m).values()]
    made = [value for value in held if isinstance(value, Projections)]
    assert made and separate - len(counts) == sum(len(p.stacked.weights()) - 1 for p in made)


@torch.no_grad()
def test_weights_stay_in_the_state_dict_and_are_replaced_in_place():
    model, other, ids = tiny_model(), tiny_model(), torch.arange(5)
    names = {name: weight.shape for name, weight in model.state_dict().items()}
    for weight in other.parameters():
        weight.mul_(1.5)
    join(model)
    assert {name: weight.shape for name, weight in model.state_dict().items()} == names
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(logits_of(model, ids), logits_of(other, ids))


def test_gradients_reach_every_linear_of_a_joined_model():
    first, second = Linear(3, 2), Linear(3, 4)
    for linear in (first, second):
        torch.nn.init.normal_(linear.weight)
    module = torch.nn.Module()
    module.first, module.second = first, second
    module.both = Projections(module, ("first",), ("second",))
    join(module)
    x = torch.randn(5, 3)
    sum(part.sum() for part in module.both(x)).backward()
    torch.testing.assert_close(first.weight.grad, x.sum(0).expand(2, 3))
    torch.testing.assert_close(second.weight.grad, x.sum(0).expand(4, 3))


@torch.no_grad()
def test_neighbours_in_other_storages_are_not_taken_for_joined():
    buffer = torch.randn(6, 3)
    first, second = Linear(3, 2), Linear(3, 4)
    first.weight.data, second.weight.data = buffer[:2], buffer[2:].clone()
    module = torch.nn.Module()
    module.first, module.second = first, second
    x = torch.randn(5, 3)
    a, b = Projections(module, ("first",), ("second",))(x)
    torch.testing.assert_close(a, x @ first.weight.T)
    torch.testing.assert_close(b, x @ second.weight.T)


def test_what_is_joined_stays_where_it_is():
    model = tiny_model()
    join(model)
    before = [weight.data_ptr() for weight in model.parameters()]
    join(model)
    assert [weight.data_ptr() for weight in model.parameters()] == before


def test_add_to_sums_in_place_without_gradients_only():
    generator = torch.Generator().manual_seed(0)
    linear = Linear(5, 3, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.normal_(generator=generator)
    x, y = (torch.randn(4, n, generator=generator, dtype=torch.float64) for n in (5, 3))
    expected, before = y + linear(x), y.clone()
    linear.add_to(y, x).sum().backward()
    assert linear.weight.grad is not None and torch.equal(y, before)
    with torch.no_grad():
        given = y.clone()
        assert linear.add_to(given, x).data_ptr() == given.data_ptr()
        torch.testing.assert_close(given, expected)
        torch.testing.assert_close(linear.add_to(y.float(), x), expected)


@torch.no_grad()
def test_weights_that_are_replaced_or_moved_are_the_ones_that_count():
    model, ids = tiny_model(), torch.arange(5)
    join(model)
    before = logits_of(model, ids)
    layer = model.language_model.model.layers[0].self_attn
    layer.k_proj.weight = torch.nn.Parameter(layer.k_proj.weight * 2)
    doubled = logits_of(model, ids)
    other = tiny_model()
    own = other.language_model.model.layers[0].self_attn
    own.k_proj.weight.mul_(2)
    torch.testing.assert_close(doubled, logits_of(other, ids))
    copied = copy.deepcopy(model)
    own = copied.language_model.model.layers[0].self_attn
    own.k_proj.weight.mul_(0.5)
    torch.testing.assert_close(logits_of(copied, ids), before)
    torch.testing.assert_close(logits_of(model, ids), doubled)
