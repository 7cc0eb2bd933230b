"""rms_norm as a loop: rows of a wider matrix stay where they are."""

import pytest
import torch

from k3_core.replay import Recording
from k3_kernels.rms_norm import loops


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.inference_mode()
def test_rows_of_a_wider_matrix(dtype):
    x, weight = torch.randn(5, 40, dtype=dtype), torch.randn(16, dtype=dtype)
    part = x[:, 8:24]
    recording = Recording(lambda: loops.rms_norm(part, weight, eps=1e-5))
    assert torch.equal(recording.result, loops.rms_norm(part.clone(), weight, eps=1e-5))
    assert recording.result.is_contiguous()
    assert len(recording._calls) == 1  # no copy


@torch.inference_mode()
def test_columns_and_more_dimensions():
    x, weight = torch.randn(3, 4, 32), torch.randn(16)
    for part in (x[..., ::2], x[..., 5:21], x[0].t()[::2].t()):
        got = loops.rms_norm(part, weight, eps=1e-5)
        assert torch.equal(got, loops.rms_norm(part.clone(), weight, eps=1e-5))
