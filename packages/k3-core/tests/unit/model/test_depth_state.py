"""The running sum of the depth mixers."""

import pytest
import torch

from k3_core.residual.base import DepthState


def test_outputs_join_the_running_sum_and_wait_for_its_reader():
    one, two = torch.ones(2, 3), torch.full((2, 3), 2.0)
    state = DepthState(None)
    state.add(one)
    state.add(two)
    assert [x.unique().item() for x in state.parts] == [1.0, 2.0]
    assert (state.prefix == 3).all() and state.parts == (state.prefix, None)
    state.add(one)
    state.replace(two)
    assert state.parts == (two, None)
    state.replace(None)
    state.add(one)
    assert state.prefix is one


def test_the_sum_is_replaced_by_a_method_only():
    """torch.compile of 2.11 leaves out what the setter of a property does."""
    with pytest.raises(AttributeError, match="prefix"):
        DepthState(None).prefix = torch.ones(1)
