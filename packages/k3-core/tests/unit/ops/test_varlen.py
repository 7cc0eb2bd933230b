"""Offsets and lengths of packed sequences."""

import pytest
import torch

from k3_core.ops.varlen import host_lengths


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_of_offsets(dtype):
    offsets = torch.tensor([0, 3, 3, 7], dtype=dtype)
    assert host_lengths(offsets, None, 7, "op") == (3, 0, 4)
    assert host_lengths(offsets, (3, 0, 4), 7, "op") == (3, 0, 4)
    assert host_lengths(torch.tensor([0]), None, 0, "op") == ()


@pytest.mark.parametrize(
    ("offsets", "seqlens", "error", "message"),
    [
        ([1, 7], None, ValueError, "start at 0 and end at the number of tokens 7, got 1 and 7"),
        ([0, 6], None, ValueError, "got 0 and 6"),
        ([0, 5, 3, 7], None, ValueError, "decreases"),
        ([], None, ValueError, "empty"),
        ([0, 7], (3, 4), ValueError, "differ from cu_seqlens"),
        ([[0, 7]], None, TypeError, "1-D int32 or int64"),
        ([0.0, 7.0], None, TypeError, "torch.float32"),
    ],
)
def test_offsets_that_do_not_fit(offsets, seqlens, error, message):
    dtype = torch.float32 if error is TypeError and offsets == [0.0, 7.0] else torch.int64
    with pytest.raises(error, match=message):
        host_lengths(torch.tensor(offsets, dtype=dtype), seqlens, 7, "op")


@pytest.mark.parametrize("seqlens", [(3, 5), (7,), (8, -1)])
def test_lengths_that_cannot_be_those_of_a_device_tensor(seqlens):
    """Off the CPU the offsets are not read; what the host copy says must still be possible."""
    with pytest.raises(ValueError, match=r"seqlens"):
        host_lengths(torch.empty(3, dtype=torch.int64, device="meta"), seqlens, 7, "op")
