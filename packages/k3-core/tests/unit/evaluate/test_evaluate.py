"""The measuring itself: an answerer that is known to be right or wrong, a model that is known."""

import gzip
import lzma
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import k3_core
from k3_core.config import K3Config
from k3_core.evaluate.greedy import generate_greedy
from k3_core.evaluate.losses import IGNORE_INDEX, cut_windows, document_losses
from k3_core.evaluate.nano import evaluate_nano
from k3_core.evaluate.questions import count_right, unseen_questions
from k3_core.evaluate.text import heldout_texts, score_texts
from k3_core.model import K3ForConditionalGeneration
from k3_core.tasks import EFFORTS, FAMILIES, Question
from k3_core.tokenizer import K3Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> K3Tokenizer:
    path = Path(k3_core.__file__).parent / "assets" / "k3-nano" / "tiktoken.model"
    return K3Tokenizer.from_ranks(path, 3840)


@pytest.fixture(scope="module")
def model() -> K3ForConditionalGeneration:
    config = K3Config.preset("k3-test")
    config = replace(config, text=replace(config.text, vocab_size=4096))
    generator = torch.Generator().manual_seed(0)
    return K3ForConditionalGeneration(config, generator=generator).eval()


def answerer(
    questions: list[Question], effort: str, tokenizer: K3Tokenizer, *, spoil: Callable[[str], str]
) -> Callable[[list[list[int]]], list[list[int]]]:
    """Continues each prompt as the reference does; `spoil` rewrites the continuation's text."""
    replies: dict[tuple[int, ...], list[int]] = {}
    for question in questions:
        messages = question.training_messages(effort)
        options = {"tools": question.tools, "thinking_effort": effort}
        for end in (i for i, m in enumerate(messages) if m["role"] == "assistant"):
            prompt = tokenizer.apply_chat_template(messages[:end], **options)
            whole = tokenizer.apply_chat_template(
                messages[: end + 1], **options, add_generation_prompt=False
            )
            assert whole[: len(prompt)] == prompt
            text = spoil(tokenizer.decode(whole[len(prompt) :]))
            replies[tuple(prompt)] = tokenizer.encode(text, allow_special=True)
    return lambda prompts: [replies[tuple(prompt)] for prompt in prompts]


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_reference_answers_are_all_right(tokenizer: K3Tokenizer, family: str, effort: str) -> None:
    questions = unseen_questions(family, 8)
    generate = answerer(questions, effort, tokenizer, spoil=lambda text: text)
    right, num_tokens = count_right(questions, effort, tokenizer, generate)
    assert right == 8
    assert num_tokens > 8 * 10


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "old, new",
    [
        ("<|close|>response", "x<|close|>response"),  # another answer
        ("<|close|>message<|sep|><|end_of_msg|>", ""),  # no end
        ("<|open|>response<|sep|>", "<|open|>other<|sep|>"),  # no response
    ],
)
def test_spoiled_answers_are_all_wrong(
    tokenizer: K3Tokenizer, family: str, old: str, new: str
) -> None:
    questions = unseen_questions(family, 6)

    def spoil(text: str) -> str:
        return text if "<|open|>tools" in text else text.replace(old, new)

    generate = answerer(questions, "low", tokenizer, spoil=spoil)
    assert count_right(questions, "low", tokenizer, generate)[0] == 0


@pytest.mark.parametrize(
    "old, new",
    [
        ('type="string"<|sep|>', 'type="string"<|sep|>x'),  # another argument
        ('tool="get', 'tool="set'),  # another tool
        (
            "<|open|>tools<|sep|>",
            '<|open|>tools<|sep|><|open|>call tool="a" index="1"<|sep|><|close|>call<|sep|>',
        ),  # two calls
    ],
)
def test_wrong_calls_are_not_answered(tokenizer: K3Tokenizer, old: str, new: str) -> None:
    """The result reads "not found", so a right answer cannot follow; two calls end the attempt."""
    questions = unseen_questions("tool_lookup", 6)
    first_prompts = {
        tuple(tokenizer.apply_chat_template(q.messages, tools=q.tools, thinking_effort="low"))
        for q in questions
    }
    generate = answerer(questions, "low", tokenizer, spoil=lambda text: text.replace(old, new))

    def with_later_prompts(prompts: list[list[int]]) -> list[list[int]]:
        if {tuple(prompt) for prompt in prompts} <= first_prompts:
            return generate(prompts)
        assert all("not found" in tokenizer.decode(prompt) for prompt in prompts)
        reply = "<|close|>think<|sep|><|open|>response<|sep|>not found<|close|>response<|sep|>"
        reply += "<|close|>message<|sep|><|end_of_msg|>"
        return [tokenizer.encode(reply, allow_special=True) for _ in prompts]

    assert count_right(questions, "low", tokenizer, with_later_prompts)[0] == 0


def test_unseen_questions_are_different_and_of_the_test_split() -> None:
    for family in FAMILIES:
        questions = unseen_questions(family, 200)
        assert len({question.key for question in questions}) == 200
        assert {question.split for question in questions} == {"test"}
        assert questions == unseen_questions(family, 200)
        assert questions != unseen_questions(family, 200, seed=1)


def test_batched_greedy_equals_one_at_a_time(model: K3ForConditionalGeneration) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4096, (n,), generator=generator).tolist() for n in (3, 1, 9, 4)]
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(8):
            logits = model(input_ids=torch.tensor([ids])).logits
            ids.append(int(logits[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    stop = expected[0][3]
    cut = [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in expected]
    found = generate_greedy(model, prompts, stop_ids=frozenset({stop}), max_tokens=8, batch_size=3)
    assert found == cut
    assert any(len(ids) < 8 for ids in found)


@pytest.mark.parametrize("length", [2, 5, 8, 9, 30])
def test_windows_score_every_token_once_with_context(length: int) -> None:
    ids = list(range(100, 100 + length))
    scored = []
    for inputs, labels in cut_windows(ids, 8, 2):
        assert len(inputs) == len(labels) <= 8
        for position, label in enumerate(labels):
            if label != IGNORE_INDEX:
                assert label == inputs[position] + 1
                assert position >= 2 or inputs[0] == ids[0]
                scored.append(label)
    assert scored == ids[1:]


def test_losses_of_documents_are_those_of_each_window_alone(
    model: K3ForConditionalGeneration,
) -> None:
    """In float64, by a loop over the tokens: [2 before it at least, 8 at most]."""
    generator = torch.Generator().manual_seed(2)
    documents = [torch.randint(4096, (n,), generator=generator).tolist() for n in (1, 21, 0, 5, 2)]
    found = document_losses(model, documents, window=8, overlap=2, tokens_per_forward=20)
    assert [len(losses) for losses in found] == [0, 20, 0, 4, 1]
    for ids, losses in zip(documents, found, strict=True):
        for place, loss in enumerate(losses.tolist(), 1):
            first = 0 if place <= 8 else 6 * ((place - 3) // 6)
            context = torch.tensor([ids[first:place]])
            logits = model(input_ids=context).logits[0, -1].detach().double()
            assert loss == pytest.approx(-float(logits.log_softmax(-1)[ids[place]]), rel=1e-5)
    with pytest.raises(ValueError, match=r"overlap of 8 is not in 0\.\.7"):
        document_losses(model, documents, window=8, overlap=8)


def test_a_uniform_model_costs_log_vocabulary(
    model: K3ForConditionalGeneration, tokenizer: K3Tokenizer
) -> None:
    texts = ["import os\n\nprint(os.name)\n" * 5, "x = [1, 2]\n"]
    head = model.language_model.lm_head.weight
    kept = head.detach().clone()
    try:
        head.data.zero_()
        score = score_texts(model, tokenizer, texts, window=16, tokens_per_forward=40)
    finally:
        head.data.copy_(kept)
    data = "".join(texts).encode()
    num_tokens = sum(len(tokenizer.encode(text)) for text in texts)
    assert (score.num_files, score.num_bytes, score.num_tokens) == (2, len(data), num_tokens)
    assert score.bits_per_byte == pytest.approx(num_tokens * math.log2(4096) / len(data), rel=1e-5)
    assert score.gzip_9 == 8 * len(gzip.compress(data, 9)) / len(data)
    assert score.xz == 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)


def test_window_score_equals_the_whole_text_when_it_fits(
    model: K3ForConditionalGeneration, tokenizer: K3Tokenizer
) -> None:
    text = "def f(a, b):\n    return a + b\n"
    ids = [tokenizer.bos_id, *tokenizer.encode(text)]
    logprobs = model(input_ids=torch.tensor([ids])).logits[0].detach().double().log_softmax(-1)
    nats = -sum(float(logprobs[t, ids[t + 1]]) for t in range(len(ids) - 1))
    score = score_texts(model, tokenizer, [text])
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / len(text), rel=1e-5)


def test_heldout_texts_stop_at_the_asked_bytes() -> None:
    texts = heldout_texts(20_000)
    assert sum(len(text.encode()) for text in texts[:-1]) < 20_000
    assert sum(len(text.encode()) for text in texts) >= 20_000
    assert heldout_texts()[: len(texts)] == texts


def test_report_of_an_untrained_model(
    model: K3ForConditionalGeneration, tokenizer: K3Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3_core.evaluate.nano.MAX_TOKENS", 5)
    result = evaluate_nano(
        model, tokenizer, num_questions=2, families=["sum"], efforts=["low"], max_text_bytes=0
    )
    assert result["accuracy"] == {"sum": {"low": 0.0}}
    assert 1 <= result["tokens_per_answer"]["sum"]["low"] <= 5
    assert result["text"] is None
