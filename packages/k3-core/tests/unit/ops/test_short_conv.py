"""short_conv: what it refuses and the dtype of the state; values are a property test."""

import pytest
import torch

from k3_core.ops.short_conv.reference import short_conv

X, WEIGHT, CU = torch.randn(5, 3), torch.randn(3, 1, 4), torch.tensor([0, 2, 5])


def test_the_state_keeps_its_dtype():
    state = torch.zeros(2, 3, 3, dtype=torch.bfloat16)
    y, final = short_conv(
        X, WEIGHT, cu_seqlens_N1=CU, initial_state_NCW=state, output_final_state=True
    )
    assert y.dtype == torch.float32 and final.dtype == torch.bfloat16
    assert short_conv(X, WEIGHT, cu_seqlens_N1=CU)[1] is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x_TC": torch.zeros(1, 5, 3)}, ValueError, "x must be"),
        ({"x_TC": torch.zeros(5, 3, dtype=torch.int64)}, TypeError, "x is torch.int64"),
        ({"weight_C1W": torch.zeros(3, 4)}, ValueError, "weight must be"),
        ({"weight_C1W": torch.zeros(4, 1, 4)}, ValueError, "C = 3 from x"),
        ({"weight_C1W": torch.zeros(3, 1, 5)}, ValueError, "initial_state has shape"),
        ({"initial_state_NCW": torch.zeros(2, 3, 4)}, ValueError, "initial_state has shape"),
        ({"initial_state_NCW": torch.zeros(1, 3, 3)}, ValueError, "initial_state has shape"),
    ],
)
def test_what_does_not_fit_is_named(change, error, message):
    args = {"x_TC": X, "weight_C1W": WEIGHT, "initial_state_NCW": torch.zeros(2, 3, 3), **change}
    with pytest.raises(error, match=message):
        short_conv(**args, cu_seqlens_N1=CU)
