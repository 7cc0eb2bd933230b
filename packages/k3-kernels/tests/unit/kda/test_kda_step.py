"""kda_step's kernel against the reference in float64 (report 1.1, 1.8)."""

import pytest
import torch

from k3_core.ops.kda_step.reference import kda_step as reference
from k3_core.testing.tolerance import relative_error
from k3_core.testing.values import Values
from k3_kernels.kda_step.config import StepBlocks, choose_step_blocks
from k3_kernels.kda_step.op import kda_step

S, H = 6, 2


def draw(rows, tokens, num_k, num_v, device, dtype=torch.float32):
    v, lead = Values(dtype, device), (rows, tokens, H)
    args = [v.act(*lead, num_k), v.act(*lead, num_k), v.act(*lead, num_v)]
    args += [v.act(*lead, num_k), v.act(*lead)]
    args += [v.full(H, scale=0.3), v.full(H, num_k, scale=0.5)]
    return args, v.full(S, H, num_v, num_k)


def check(args, pool, slots, commits=None, limit=1e-5, **options):
    """Outputs and pool against the reference; slots that no row has keep every bit."""
    device = pool.device
    named = {"slots_B": torch.tensor(slots, device=device), "lower_bound": -5.0}
    if commits is not None:
        named["num_commit_B"] = torch.tensor(commits, device=device)
    before, expected_pool = pool.clone(), pool.double()
    expected = reference(*(x.double() for x in args), state_SHVK=expected_pool, **named)
    o = kda_step(*args, state_SHVK=pool, **named, **options)
    assert o.dtype == args[2].dtype
    assert relative_error(o, expected) < limit
    assert relative_error(pool, expected_pool) < limit
    others = [slot for slot in range(S) if slot not in slots]
    assert torch.equal(pool[others], before[others])
    padded = [row for row, slot in enumerate(slots) if slot < 0]
    assert not o[padded].any()


@pytest.mark.parametrize("num_k, num_v", [(16, 16), (64, 32), (24, 40), (1, 5)])
def test_one_token(num_k, num_v, device):
    check(*draw(3, 1, num_k, num_v, device), slots=[4, -1, 0])


@pytest.mark.parametrize("commits", [None, [4, 0, 2], [1, 1, 1]])
@pytest.mark.parametrize("slots", [[4, 0, 5], [-1, 3, 0], [-1, -1, -1]])
def test_verified_tokens(slots, commits, device):
    check(*draw(3, 4, 16, 24, device), slots, commits, blocks=StepBlocks(16, 1))


def test_float16(device):
    check(*draw(3, 2, 32, 32, device, torch.float16), slots=[1, -1, 5], limit=2e-3)


def test_pools_inputs_and_slots_of_any_stride(device):
    args, pool = draw(2, 1, 16, 16, device)
    args[0] = torch.cat([args[0], args[1]], dim=-1)[..., :16]
    args[3] = args[3].transpose(2, 3).contiguous().transpose(2, 3)
    wide = torch.stack([pool, pool], dim=1)
    slots = torch.tensor([3, 9, 1, 9], device=device)[::2]
    expected_pool = pool.double()
    named = {"slots_B": slots, "lower_bound": -5.0}
    expected = reference(*(x.double() for x in args), state_SHVK=expected_pool, **named)
    o = kda_step(*args, state_SHVK=wide[:, 1], **named)
    assert relative_error(o, expected) < 1e-5
    assert relative_error(wide[:, 1], expected_pool) < 1e-5
    assert torch.equal(wide[:, 0], pool)


def test_nothing_to_do(device):
    args, pool = draw(0, 1, 16, 16, device)
    slots = torch.zeros(0, dtype=torch.int64, device=device)
    o = kda_step(*args, state_SHVK=pool, slots_B=slots, lower_bound=-5.0)
    assert o.shape == (0, 1, H, 16)


def test_refusals(device):
    args, pool = draw(2, 1, 16, 16, device)
    good = torch.tensor([0, 1], device=device)
    with pytest.raises(ValueError, match="softplus"):
        kda_step(*args, state_SHVK=pool, slots_B=good, lower_bound=None)
    with pytest.raises(ValueError, match="contiguous"):
        swapped = pool.transpose(2, 3).contiguous().transpose(2, 3)
        kda_step(*args, state_SHVK=swapped, slots_B=good, lower_bound=-5.0)
    with pytest.raises(ValueError, match="int32 or int64"):
        kda_step(*args, state_SHVK=pool, slots_B=good[:1], lower_bound=-5.0)


@pytest.mark.parametrize(
    "slots, commits, error",
    [([0, S], None, IndexError), ([2, 2], None, ValueError), ([0, 1], [1, 2], ValueError)],
)
def test_values_are_checked_where_that_does_not_wait_for_a_gpu(slots, commits, error):
    if torch.cuda.is_available():
        pytest.skip("on a GPU the kernel contains these errors instead")
    args, pool = draw(2, 1, 16, 16, "cpu")
    commit = None if commits is None else torch.tensor(commits)
    with pytest.raises(error):
        kda_step(
            *args,
            state_SHVK=pool,
            slots_B=torch.tensor(slots),
            lower_bound=-5.0,
            num_commit_B=commit,
        )


@pytest.mark.parametrize("num_k, num_v", [(128, 128), (16, 1), (256, 256)])
@pytest.mark.parametrize("num_states", [1, 768, 24576])
def test_blocks_fit_the_state(num_k, num_v, num_states):
    blocks = choose_step_blocks(num_k, num_v, num_states)
    assert blocks.values <= max(16, num_v) and blocks.warps in (1, 2, 4, 8)
