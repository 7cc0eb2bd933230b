"""short_conv in plain torch: the dtype of the state, and one refusal of each kind."""

import pytest
import torch

from k3_kernels.short_conv.cpu import short_conv

X, WEIGHT, CU = torch.randn(5, 3), torch.randn(3, 1, 4), torch.tensor([0, 2, 5])


def test_the_state_keeps_its_dtype():
    state = torch.zeros(2, 3, 3, dtype=torch.bfloat16)
    _, final = short_conv(
        X, WEIGHT, cu_seqlens_N1=CU, initial_state_NCW=state, output_final_state=True
    )
    assert final.dtype == torch.bfloat16
    assert short_conv(X, WEIGHT, cu_seqlens_N1=CU)[1] is None


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="C = 3 from x"):
        short_conv(X, torch.zeros(4, 1, 4), cu_seqlens_N1=CU)
    with pytest.raises(TypeError, match=r"x is torch\.int64"):
        short_conv(X.long(), WEIGHT, cu_seqlens_N1=CU)
    with pytest.raises(ValueError, match="initial_state has shape"):
        short_conv(X, WEIGHT, cu_seqlens_N1=CU, initial_state_NCW=torch.zeros(1, 3, 3))


def test_a_second_derivative_is_refused():
    x = X.clone().requires_grad_()
    y, _ = short_conv(x, WEIGHT, cu_seqlens_N1=CU)
    with pytest.raises(RuntimeError, match=r"short_conv\.reference"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
