"""AdamW by role: separate peaks and decays, against the formula in float64 (training 5, row 5)."""

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from k3_train.config import OptimConfig
from k3_train.optim.adamw import RoleAdamW
from k3_train.optim.roles import Role

OPTIM = OptimConfig(adamw_lr=0.01, embedding_lr=0.03, weight_decay=0.1)
CASES = {
    "embed": (Role("embedding", "adamw", True), 0.03, 0.1),
    "head": (Role("head", "adamw", True), 0.03, 0.1),
    "gate": (Role("router", "adamw", True), 0.01, 0.1),
    "norm": (Role("vector", "adamw", False), 0.01, 0.0),
}


@pytest.mark.parametrize("name", CASES)
def test_two_steps_follow_the_formula_of_the_role(name):
    roles = {key: role for key, (role, _, _) in CASES.items()}
    params = {key: Parameter(torch.tensor([1.0, -2.0])) for key in CASES}
    optimizer = RoleAdamW(params, roles, OPTIM)
    _, lr, decay = CASES[name]
    want, first, second = np.array([1.0, -2.0]), 0.0, 0.0
    for step, (factor, grad) in enumerate([(0.5, [0.3, -4.0]), (1.0, [-0.1, 2.0])], start=1):
        for param in params.values():
            param.grad = torch.tensor(grad)
        optimizer.step(factor)
        g = np.array(grad)
        first = 0.9 * first + 0.1 * g
        second = 0.95 * second + 0.05 * g**2
        want = want * (1 - lr * factor * decay)
        normed = (second / (1 - 0.95**step)) ** 0.5 + 1e-8
        want -= lr * factor * first / (1 - 0.9**step) / normed
    np.testing.assert_allclose(params[name].detach().numpy(), want, rtol=1e-5)


def test_the_state_is_whole_before_the_first_gradient():
    role = {"norm": Role("vector", "adamw", False)}
    optimizer = RoleAdamW({"norm": Parameter(torch.ones(3))}, role, OPTIM)
    state = optimizer.state_tensors()
    assert sorted(state) == ["exp_avg.norm", "exp_avg_sq.norm", "step.norm"]
    assert not any(tensor.any() for tensor in state.values())
