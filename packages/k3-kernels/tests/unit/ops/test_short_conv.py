"""Cases of short_conv beyond the conformance battery. T tokens, C channels, W taps."""

import pytest
import torch
from torch.nn import functional as F

from k3_core.ops.short_conv.reference import short_conv as reference
from k3_core.testing import relative_error
from k3_kernels.short_conv.op import short_conv, short_conv_norm, short_conv_update

CHANNELS, WIDTH = 12, 4


def _draw(num_tokens: int, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, CHANNELS, generator=generator)
    return x.to(device), torch.randn(CHANNELS, 1, WIDTH, generator=generator).to(device)


def _offsets(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(device)


@pytest.mark.parametrize("pieces", [(1, 1, 1, 8), (2, 9), (3, 1, 7), (11, 0)])
def test_pieces_equal_the_whole(pieces, device):
    # Chunks shorter than W - 1 keep older inputs (flash-linear-attention issue 1140).
    x_TC, weight = _draw(11, device)
    whole, last = short_conv(
        x_TC, weight, cu_seqlens_N1=_offsets((11,), device), output_final_state=True
    )
    state, outputs = None, []
    for x in x_TC.split(pieces):
        y, state = short_conv(
            x,
            weight,
            cu_seqlens_N1=_offsets((len(x),), device),
            initial_state_NCW=state,
            output_final_state=True,
        )
        outputs.append(y)
    assert torch.equal(torch.cat(outputs), whole)
    assert torch.equal(state, last)


@pytest.mark.parametrize("lengths", [(70,), (1, 0, 0, 2, 33, 3, 0), (0, 40), (32, 32), (5,) * 9])
def test_many_lengths(lengths, device):
    x_TC, weight = _draw(sum(lengths), device)
    cu_seqlens = _offsets(lengths, device)
    y_TC, _ = short_conv(x_TC, weight, cu_seqlens_N1=cu_seqlens)
    expected, _ = reference(x_TC.double(), weight.double(), cu_seqlens_N1=cu_seqlens)
    assert relative_error(y_TC, expected) < 1e-6


def test_nan_stays_in_its_sequence_and_its_window(device):
    x_TC, weight = _draw(20, device)
    x_TC[9] = float("nan")
    y_TC, _ = short_conv(x_TC, weight, cu_seqlens_N1=_offsets((10, 10), device))
    assert y_TC[9].isnan().all()
    assert y_TC[:9].isfinite().all() and y_TC[10:].isfinite().all()


def test_memory_behind_the_tokens_is_not_read(device):
    padded, weight = _draw(40, device)
    padded[37:] = float("nan")
    y_TC, final = short_conv(
        padded[:37], weight, cu_seqlens_N1=_offsets((37,), device), output_final_state=True
    )
    assert y_TC.isfinite().all()
    assert torch.equal(final[0], padded[34:37].T)


def test_columns_of_a_wider_matrix(device):
    x_TC, weight = _draw(9, device)
    wide = torch.cat((torch.full_like(x_TC, float("nan")), x_TC), dim=1)[:, CHANNELS:]
    cu_seqlens = _offsets((9,), device)
    expected, _ = short_conv(x_TC, weight, cu_seqlens_N1=cu_seqlens)
    assert torch.equal(short_conv(wide, weight, cu_seqlens_N1=cu_seqlens)[0], expected)


def test_norm_of_query_and_key_heads(device):
    x_TC, weight = _draw(21, device)
    cu_seqlens = _offsets((13, 8), device)
    state = torch.randn(2, CHANNELS, WIDTH - 1).to(device)
    got = short_conv_norm(
        x_TC,
        weight,
        cu_seqlens_N1=cu_seqlens,
        head_dim=4,
        num_norm_channels=8,
        initial_state_NCW=state,
    )
    y, _ = reference(
        x_TC.double(), weight.double(), cu_seqlens_N1=cu_seqlens, initial_state_NCW=state
    )
    heads = y[:, :8].unflatten(1, (2, 4))
    heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)
    assert relative_error(got, torch.cat((heads.flatten(1), y[:, 8:]), dim=1)) < 1e-6


@pytest.mark.parametrize("commit", [None, (0, 2, 3)])
def test_update_continues_the_sequence(commit, device):
    rows, new = 3, 3
    history, weight = _draw(rows * 5, device)
    x_BLC = _draw(rows * new, device, seed=1)[0].view(rows, new, CHANNELS)
    # A strided slice of the slots, as a scheduler's table gives it (vllm issue 52792).
    slots = torch.tensor([[4, 9], [-1, 9], [1, 9]]).to(device)[:, 0]
    state = torch.randn(6, CHANNELS, WIDTH - 1).to(device)
    for row, slot in enumerate((4, None, 1)):
        if slot is not None:
            state[slot] = history.view(rows, 5, CHANNELS)[row, 2:].T
    before = state.clone()
    commits = None if commit is None else torch.tensor(commit).to(device)
    y_BLC = short_conv_update(x_BLC, weight, state_SCW=state, slots_B=slots, num_commit_B=commits)
    for row, slot in ((0, 4), (2, 1)):
        tokens = torch.cat((history.view(rows, 5, CHANNELS)[row], x_BLC[row]))
        expected, _ = reference(
            tokens.double(), weight.double(), cu_seqlens_N1=_offsets((8,), device)
        )
        assert relative_error(y_BLC[row], expected[5:]) < 1e-6
        kept = new if commit is None else commit[row]
        assert torch.equal(state[slot], tokens[: 5 + kept][-3:].T)
        before[slot] = state[slot]
    assert not y_BLC[1].any()
    assert torch.equal(state, before), "a slot that no row names was written"


def test_offsets_beyond_32_bits(device):
    # 2^31 values between two tokens; the memory in between is never touched.
    stride = 2**31
    buffer = torch.empty(stride + 8, dtype=torch.float16, device=device)
    x_TC = buffer.as_strided((2, 8), (stride, 1))
    x_TC.copy_(torch.arange(16.0).view(2, 8) / 8)
    weight = torch.ones(8, 1, 4, device=device)
    y_TC, _ = short_conv(x_TC, weight, cu_seqlens_N1=torch.tensor([0, 2]).to(device))
    expected = F.silu(x_TC.double().cumsum(0))
    assert relative_error(y_TC, expected) < 1e-3


def test_errors_name_the_shapes(device):
    x_TC, weight = _draw(4, device)
    cu_seqlens = _offsets((4,), device)
    with pytest.raises(ValueError, match="one state per sequence"):
        short_conv(x_TC, weight, cu_seqlens_N1=cu_seqlens, initial_state_NCW=torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match=r"weight must be \[C, 1, W\]"):
        short_conv(x_TC, weight[:3], cu_seqlens_N1=cu_seqlens)
    with pytest.raises(ValueError, match="seqlens"):
        short_conv(x_TC, weight, cu_seqlens_N1=cu_seqlens, seqlens=(3,))
    with pytest.raises(ValueError, match="state must be contiguous"):
        # A state of another width (sglang issue 38622).
        short_conv_update(
            x_TC[:, None], weight, state_SCW=torch.zeros(4, CHANNELS, 5), slots_B=torch.arange(4)
        )
