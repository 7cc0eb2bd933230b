"""Sampling against exact enumeration, and its independence of everything but (seed, position)."""

import math

import pytest
import torch

from k3_core.engine import Sampling
from k3_core.engine.sampling import (
    _keep_nucleus,
    choose_rows,
    raw_logprobs,
    sample_rows,
    token_logprobs,
    uniform,
)

PROBS = (0.4, 0.05, 0.3, 0.05, 0.2)


def choose(logits, sampling, position, mask=None) -> int:
    """One row."""
    return choose_rows(logits[None], [sampling], [position], [mask])[0]


def frequencies(sampling: dict, logits: torch.Tensor, num_draws: int = 4000) -> list[float]:
    counts = [0] * len(logits)
    for seed in range(num_draws):
        counts[choose(logits, Sampling(seed=seed, **sampling), position=3)] += 1
    return [count / num_draws for count in counts]


def close_to(measured: list[float], expected: list[float]) -> bool:
    """Within five standard deviations of a binomial of 4000 draws."""
    return all(
        abs(m - e) <= 5 * math.sqrt(e * (1 - e) / 4000) + 1e-12
        for m, e in zip(measured, expected, strict=True)
    )


def test_temperature_one_draws_from_the_softmax() -> None:
    assert close_to(frequencies({}, torch.tensor(PROBS).log()), list(PROBS))


def test_temperature_sharpens_as_a_power_of_the_probabilities() -> None:
    powers = [p**2 for p in PROBS]
    expected = [p / sum(powers) for p in powers]
    assert close_to(frequencies({"temperature": 0.5}, torch.tensor(PROBS).log()), expected)


def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_it() -> None:
    expected = [0.4 / 0.9, 0.0, 0.3 / 0.9, 0.0, 0.2 / 0.9]
    assert close_to(frequencies({"top_p": 0.85}, torch.tensor(PROBS).log()), expected)
    assert frequencies({"top_p": 0.1}, torch.tensor(PROBS).log(), 50)[0] == 1.0


def test_uniform_is_spread_evenly_and_differs_by_seed_and_position() -> None:
    values = sorted(uniform(7, position) for position in range(4000))
    gaps = max(abs(value - i / 4000) for i, value in enumerate(values))
    assert gaps < 1.95 / math.sqrt(4000)  # Kolmogorov-Smirnov at the 0.1 % level
    assert uniform(1, 2) != uniform(2, 1)
    assert 0 <= uniform(-(2**63), 0) < 1


def test_greedy_takes_the_maximum_and_bias_moves_it() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0])
    assert choose(logits, Sampling(temperature=0), 0) == 1
    assert choose(logits, Sampling(temperature=0, logit_bias={2: 1.5, 1: -1.0}), 0) == 2


def test_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = torch.tensor([1e4, -1e4, 9.9e3])
    assert {choose(logits, Sampling(temperature=1e-9, seed=s), 0) for s in range(20)} == {0}


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    assert {choose(logits, Sampling(seed=s), 0) for s in range(200)} == {1, 3}


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits_BV = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    samplings = [Sampling(seed=s, temperature=1.3, top_p=0.9, top_logprobs=2) for s in range(5)]
    together = sample_rows(logits_BV, samplings, [4, 5, 6, 7, 8])
    for row in range(5):
        alone = sample_rows(logits_BV[row : row + 1], samplings[row : row + 1], [4 + row])
        assert alone == [together[row]]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.tensor([0.5, 2.5, -1.0, 2.0], dtype=torch.bfloat16)
    biased = Sampling(temperature=0.1, top_p=0.5, seed=3, logit_bias={0: 5.0}, top_logprobs=3)
    (token,) = sample_rows(logits[None], [biased], [0])
    total = math.log(sum(math.exp(float(x)) for x in logits))
    assert token is not None
    assert token.logprob == pytest.approx(float(logits[token.token_id]) - total, abs=1e-6)
    assert [i for i, _ in token.top] == [1, 3, 0]
    assert token.top[0][1] == pytest.approx(2.5 - total, abs=1e-6)


def test_top_logprobs_beyond_the_vocabulary_give_all_of_it() -> None:
    (token,) = token_logprobs(raw_logprobs(torch.zeros(1, 3)), [0], 20)
    assert len(token.top) == 3


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(poison: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = poison
    first, bad, last = sample_rows(logits, [Sampling(temperature=0)] * 3, [0, 0, 0])
    assert bad is None
    assert first is not None
    assert first == last


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": ("a", "")}, "stop"),
        ({"logit_bias": {3: math.inf}}, r"logit_bias\[3\]"),
        ({"top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_values_out_of_range_are_named(fields: dict, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is .* must be"):
        Sampling(**fields)


def test_rows_together_draw_what_each_draws_alone() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = logits.clone()
    mask = torch.arange(50) % 3 == 0
    for seed in range(40):
        samplings = [
            Sampling(seed=seed),
            Sampling(temperature=0, logit_bias={3: 9.0}),
            Sampling(temperature=0.3, top_p=0.5, seed=seed + 1),
            Sampling(temperature=2.0, top_p=0.9, seed=seed, logit_bias={1: -2.0}),
            Sampling(seed=seed + 7),
            Sampling(temperature=0),
        ]
        masks, positions = [None, None, None, mask, mask, mask], range(5, 11)
        alone = [choose(*one) for one in zip(logits, samplings, positions, masks, strict=True)]
        assert choose_rows(logits, samplings, positions, masks) == alone
        assert alone[1] == 3 and all(token % 3 == 0 for token in alone[3:])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("kind", ["peaked", "wide", "flat", "tied", "one", "mixed"])
@pytest.mark.parametrize("num_tokens", [3, 64, 65, 300])
def test_the_nucleus_is_that_of_a_sort_of_all_tokens(kind, num_tokens) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    noise = torch.randn(7, num_tokens, generator=generator, dtype=torch.float64)
    logits = {
        "peaked": 5 * noise,
        "wide": 0.3 * noise,
        "flat": 0 * noise,
        "tied": noise.round(),
        "one": 1000 * noise,
        "mixed": torch.linspace(0, 6, 7)[:, None] * noise,
    }[kind]
    probs = torch.softmax(logits, -1)
    for top_p in (1e-9, 0.1, 0.5, 0.95, 0.999999):
        kept = _keep_nucleus(probs, torch.full((7, 1), top_p, dtype=torch.float64))
        for row, found in zip(probs.tolist(), kept.tolist(), strict=True):
            wanted, mass = [0.0] * num_tokens, 0.0
            for index in sorted(range(num_tokens), key=lambda i: (-row[i], i)):
                if mass >= top_p:
                    break
                wanted[index] = row[index]
                mass += row[index]
            assert found == wanted
