"""A grammar's masks during generation: what is drawn, when it ends, and who fails."""

from dataclasses import dataclass, field, replace

import pytest
import torch

from k3_core.engine import Request, Sampling, SimpleEngine, Suspended
from k3_core.engine.sampling import choose_rows, sample_rows


@dataclass
class Alternating:
    """Allows even ids after odd ones and odd ids after even ones, `length` tokens in all."""

    length: int = 6
    taken: list[int] = field(default_factory=list)
    stuck_at: int | None = None

    @property
    def is_complete(self) -> bool:
        return len(self.taken) == self.length

    def allowed_mask(self, vocab_size):
        if len(self.taken) == self.stuck_at:
            return torch.zeros(vocab_size, dtype=torch.bool)
        return torch.arange(vocab_size) % 2 == len(self.taken) % 2

    def advance(self, token_id):
        assert token_id % 2 == len(self.taken) % 2, "a token outside the mask was drawn"
        self.taken.append(token_id)

    def clone(self):
        return replace(self, taken=list(self.taken))


def request(temperature=1.0, **fields):
    sampling = Sampling(max_tokens=20, temperature=temperature, seed=5)
    return Request((1, 2, 3), sampling, constraint=Alternating(**fields))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_tokens_are_drawn_until_the_constraint_is_complete(fake_model, temperature):
    asked = request(temperature)
    with SimpleEngine(fake_model) as engine:
        first, again = engine.generate([asked, asked])
    assert [i % 2 for i in first.token_ids] == [0, 1, 0, 1, 0, 1]
    assert first.finish_reason == "stop" and first.token_ids == again.token_ids
    assert asked.constraint.taken == [], "the request's own constraint is not touched"


def test_a_constraint_without_a_way_out_fails_alone(fake_model):
    with SimpleEngine(fake_model) as engine:
        bad, good = engine.generate([request(stuck_at=2), request()])
    assert bad.finish_reason == "error" and "allows no token" in bad.error
    assert len(bad.token_ids) == 2 and len(good.token_ids) == 6


def test_a_resumed_constraint_knows_the_tokens_so_far(fake_model):
    asked = request()
    with SimpleEngine(fake_model) as engine:
        (whole,) = engine.generate([asked])
        rest = list(engine.resume(Suspended(asked, whole.token_ids[:4])))
    assert tuple(event.token_id for event in rest) == whole.token_ids[4:]
    with pytest.raises(ValueError, match="constraint"):
        Suspended(asked, ()).to_json()


def test_a_mask_acts_after_the_bias_and_leaves_logprobs_raw():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    mask = torch.tensor([False, True, True, True])
    biased = Sampling(temperature=0, logit_bias={0: 100.0})
    assert choose_rows(logits, [biased], [0], [mask]) == [1]
    (token,) = sample_rows(logits, [biased], [0], [mask])
    assert token.logprob == pytest.approx(float(logits.log_softmax(-1)[0, 1]))
