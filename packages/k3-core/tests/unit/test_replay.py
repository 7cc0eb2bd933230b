"""Recordings of steps: the same values as the step itself, or a clear refusal."""

import pytest
import torch

from k3_core.replay import RecordError, Recording, launch

SHAPE = (4, 6)


def steps():
    """Steps of one input [4, 6], by name."""
    weight = torch.randn(6, 6, dtype=torch.float64)
    table = torch.randn(9, 6, dtype=torch.float64)

    def products(x):
        return torch.addmm(x, x, weight.t()).addmm_(x, weight), x @ weight

    def views(x):
        left, right = x.split((2, 4), dim=-1)
        whole = torch.cat((right, left), dim=-1), x.t().flatten()
        return right.contiguous() * 2, left.reshape(-1), *whole

    def scalars(x):
        return (
            (x * 3 + 1).sigmoid().floor_divide(0.25),
            (x > 0).to(x.dtype),
            x.sum(-1, keepdim=True),
        )

    def indices(x):
        places = (x[:, 0].abs() * 100).long() % 9
        made = torch.zeros(9, 6, dtype=x.dtype)
        made[places] = x
        return table[places], made, torch.arange(4) + places

    def several(x):
        return (*x.topk(2), *x.max(dim=0), *torch.sort(x, dim=-1))

    def in_place(x):
        made = torch.empty_like(x)
        made.copy_(x).mul_(2)[1].fill_(7)
        return made, made.clone().transpose(0, 1).contiguous()

    def constants(x):
        kept, changed = torch.arange(6), torch.arange(1, 7)
        return kept * x, changed.mul_(2), changed.add_((x[0] > 0).long())

    return [products, views, scalars, indices, several, in_place, constants]


@pytest.mark.parametrize("step", steps(), ids=lambda step: step.__name__)
@torch.inference_mode()
def test_a_replay_gives_what_the_step_gives_for_new_inputs(step):
    x = torch.randn(SHAPE, dtype=torch.float64)
    recording = Recording(lambda: step(x))
    for _ in range(3):
        x.copy_(torch.randn(SHAPE, dtype=torch.float64))
        expected = step(x)
        recording.replay()
        for got, wanted in zip(recording.result, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0, 0].item(),
        lambda x: x.tolist(),
        lambda x: int(x[0, 0]),
        lambda x: float(x[0, 0]),
        lambda x: bool((x > 0).all()),
        lambda x: x.numpy(),
        lambda x: 1.0 in x,
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x + 1),
        lambda x: x.unique(),
    ],
)
@torch.inference_mode()
def test_what_reads_values_on_the_host_is_refused(read):
    x = torch.ones(SHAPE)
    with pytest.raises(RecordError, match=r"on the host|depends on values"):
        Recording(lambda: read(x))
    # The thread records again, and ordinary calls are not watched.
    assert Recording(lambda: x + 1).result is not None and read(x) is not None


@torch.inference_mode()
def test_a_launch_is_made_again_and_must_say_the_same():
    x, seen, answers = torch.ones(3), [], [True, True, False]

    def kernel(address, count):
        seen.append((address, count))
        return answers[len(seen) - 1]

    recording = Recording(lambda: launch(kernel, x.data_ptr(), 3))
    recording.replay()
    assert seen == [(x.data_ptr(), 3)] * 2
    with pytest.raises(RuntimeError, match="gave False, not True"):
        recording.replay()
    assert launch(lambda: None) is None and len(seen) == 3


@torch.inference_mode()
def test_a_recording_inside_another_is_refused():
    with pytest.raises(RecordError, match="under way"):
        Recording(lambda: Recording(lambda: None))
