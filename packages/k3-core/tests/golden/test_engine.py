"""The simple engine on the golden text model: its greedy tokens and its log-probabilities."""

import json

import pytest
import torch
from safetensors.torch import load_file

from k3_core import K3Config, K3ForConditionalGeneration
from k3_core.engine import Images, Request, Sampling, SimpleEngine, Suspended


@pytest.fixture(scope="module")
def text_tiny(golden):  # type: ignore[no-untyped-def]
    return K3ForConditionalGeneration.from_pretrained(golden("text_tiny"))


@pytest.fixture(scope="module")
def case(golden) -> dict:  # type: ignore[no-untyped-def]
    return json.loads((golden("text_tiny") / "cases.json").read_text())


@pytest.fixture
def engine(text_tiny):  # type: ignore[no-untyped-def]
    with SimpleEngine(text_tiny, max_batch=4, prefill_chunk=7) as engine:
        yield engine


def test_greedy_tokens_equal_the_released_code(engine, case) -> None:  # type: ignore[no-untyped-def]
    prompt = tuple(case["input_ids"][: case["greedy"]["prompt_tokens"]])
    wanted = case["greedy"]["generated"]
    greedy = Sampling(max_tokens=len(wanted), temperature=0)
    others = [Request(tuple(case["input_ids"][:n]), greedy) for n in (1, 5, 30)]
    alone, together, *_ = engine.generate([Request(prompt, greedy)]) + engine.generate(
        [Request(prompt, greedy), *others]
    )
    assert list(alone.token_ids) == wanted
    assert list(together.token_ids) == wanted


def test_logprobs_equal_a_full_forward(engine, text_tiny, case) -> None:  # type: ignore[no-untyped-def]
    prompt = case["input_ids"][:20]
    sampling = Sampling(max_tokens=8, seed=3, top_logprobs=3, has_prompt_logprobs=True)
    (done,) = engine.generate([Request(tuple(prompt), sampling)])
    ids = torch.tensor([[*prompt, *done.token_ids]])
    with torch.no_grad():
        full = text_tiny(input_ids=ids).logits[0].double().log_softmax(-1)
    expected = full[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    got = [t.logprob for t in done.prompt_logprobs[1:]] + list(done.logprobs)
    # Chunks of 7 and single tokens against all at once: on random prompts up to 4e-5 apart.
    assert got == pytest.approx(expected, abs=1e-4)
    best = full[19:-1].topk(3).values.tolist()
    assert [[v for _, v in top] for top in done.top_logprobs] == [
        pytest.approx(row, abs=1e-4) for row in best
    ]


def test_a_used_slot_answers_as_an_empty_one(text_tiny, case) -> None:  # type: ignore[no-untyped-def]
    """An edited last message, a shorter and a repeated prompt, each after the others' states."""
    ids = case["input_ids"]
    prompts = [tuple(x) for x in (ids[:20], [*ids[:15], *ids[30:35]], ids[:9], ids[:20])]
    greedy = Sampling(max_tokens=3, temperature=0)
    requests = [Request(prompt, greedy) for prompt in prompts]
    with SimpleEngine(text_tiny, max_batch=1, prefill_chunk=7) as engine:
        used = engine.generate(requests)
    for request, done in zip(requests, used, strict=True):
        with SimpleEngine(text_tiny, max_batch=1, prefill_chunk=7) as engine:
            (expected,) = engine.generate([request])
        assert (done.token_ids, done.logprobs) == (expected.token_ids, expected.logprobs)


def test_a_seed_gives_the_same_text_in_any_company(engine, case) -> None:  # type: ignore[no-untyped-def]
    prompt = tuple(case["input_ids"][:12])
    requests = [
        Request(prompt, Sampling(max_tokens=12, seed=seed, temperature=1.5))
        for seed in (1, 2, 3, 1)
    ]
    first, second, third, again = (done.token_ids for done in engine.generate(requests))
    assert first == again
    assert len({first, second, third}) == 3
    assert engine.generate(requests[1:2])[0].token_ids == second


@pytest.mark.parametrize("name", ["mm_tiny", "mxfp4_tiny"])
def test_images_in_the_prompt_give_the_released_tokens(golden, name: str) -> None:  # type: ignore[no-untyped-def]
    folder = golden(name)
    case = json.loads((folder / "cases.json").read_text())
    tensors = load_file(folder / "vision.safetensors")
    images = Images(tensors["pixel_values"], tensors["grid_thws"])
    wanted = case["multimodal_greedy"]["generated"]
    request = Request(
        tuple(case["multimodal_input_ids"]), Sampling(len(wanted), temperature=0), images
    )
    resumed = Suspended.from_json(Suspended(request, tuple(wanted[:2])).to_json())
    model = K3ForConditionalGeneration.from_pretrained(folder)
    with SimpleEngine(model, prefill_chunk=9) as engine:
        handle = engine.submit(request)
        assert [event.token_id for event in handle] == wanted
        assert [event.token_id for event in engine.resume(resumed)] == wanted[2:]
    logits = load_file(folder / "multimodal_forward.safetensors")["logits"]
    assert handle.num_prompt_tokens == logits.shape[1]


def test_weights_of_another_checkpoint_give_its_tokens(golden) -> None:  # type: ignore[no-untyped-def]
    config = K3Config.from_file(golden("text_tiny"))
    models = [
        K3ForConditionalGeneration(config, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 2)
    ]
    requests = [Request((5, 9, 2), Sampling(max_tokens=10, temperature=0))]
    with SimpleEngine(models[1]) as engine:
        wanted = engine.generate(requests)
    with SimpleEngine(models[0]) as engine:
        before = engine.generate(requests)
        engine.update_weights(models[1].state_dict(), version=4)
        after = engine.generate(requests)
    assert before[0].token_ids != wanted[0].token_ids
    assert after[0].token_ids == wanted[0].token_ids
    assert after[0].logprobs == wanted[0].logprobs
    assert set(after[0].versions) == {4}
