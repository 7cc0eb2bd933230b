"""Generated conversations and the corpus files made of them."""

import hashlib
import json
import random
from pathlib import Path

import pytest

import k3_core
from k3_core.evaluate import stdlib
from k3_core.tasks import EFFORTS, FAMILIES, draw
from k3_core.tokenizer import K3Tokenizer
from k3_train.data.conversations import draw_conversation
from k3_train.data.corpus import build_chat, build_stdlib
from k3_train.data.encode import encode_batch, render
from k3_train.data.sources.generated import CONVERSATIONS_PER_BLOCK, ChatSource
from k3_train.data.token_file import TokenFile


@pytest.fixture(scope="module")
def tokenizer() -> K3Tokenizer:
    path = Path(k3_core.__file__).parent / "assets" / "k3-nano" / "tiktoken.model"
    return K3Tokenizer.from_ranks(path, 3840)


def targets(tokenizer: K3Tokenizer, ids: list[int], mask: list[int]) -> list[str]:
    """The texts of the runs of ids that carry loss."""
    runs: list[list[int]] = []
    previous = 0
    for token, flag in zip(ids, mask, strict=True):
        if flag and not previous:
            runs.append([])
        if flag:
            runs[-1].append(token)
        previous = flag
    return [tokenizer.decode(run) for run in runs]


def expected_target(message: dict, thinking: bool) -> str:
    """What an assistant message looks like after its generation prefix, written out by hand."""

    def tag(name: str, body: str) -> str:
        return f"<|open|>{name}<|sep|>{body}<|close|>{name.split()[0]}<|sep|>"

    text = tag("response", message["content"])
    if thinking:
        text = tag("think", message["reasoning_content"]) + text
    for call in message.get("tool_calls", ()):
        function = call["function"]
        ((key, value),) = function["arguments"].items()
        argument = tag(f'argument key="{key}" type="string"', value)
        text += tag("tools", tag(f'call tool="{function["name"]}" index="1"', argument))
    prefix = "<|open|>think<|sep|>" if thinking else "<|open|>response<|sep|>"
    return text.removeprefix(prefix) + "<|close|>message<|sep|><|end_of_msg|>"


def test_mask_covers_exactly_what_the_assistant_writes(tokenizer: K3Tokenizer) -> None:
    rng = random.Random(1)
    for _ in range(120):
        talk = draw_conversation(rng)
        ids, mask = render(tokenizer, talk)
        assert set(mask) == {0, 1}
        assert targets(tokenizer, ids, mask) == [
            expected_target(m, talk.thinking) for m in talk.messages if m["role"] == "assistant"
        ]
        assert ids == tokenizer.apply_chat_template(
            talk.messages,
            tools=talk.tools,
            thinking=talk.thinking,
            thinking_effort=talk.effort,
            add_generation_prompt=False,
        )


def test_conversations_have_every_family_at_every_effort() -> None:
    talks = [draw_conversation(random.Random(seed)) for seed in range(1000)]
    seen = {(family, talk.effort) for talk in talks for family in talk.families}
    assert seen == {(family, effort) for family in FAMILIES for effort in (*EFFORTS, None)}
    assert {len(talk.families) for talk in talks} == {1, 2, 3, 4}


def test_test_questions_never_enter_a_conversation() -> None:
    rng = random.Random(2)
    prompts = {
        message["content"]
        for _ in range(2000)
        for message in draw_conversation(rng).messages
        if message["role"] == "user"
    }
    for family in FAMILIES:
        held_out = {draw(family, rng, "test").prompt for _ in range(500)}
        assert not prompts & held_out


def test_chat_file_does_not_depend_on_the_number_of_blocks_asked_for(
    tokenizer: K3Tokenizer, tmp_path: Path
) -> None:
    short = build_chat(tmp_path / "short", tokenizer, 1000, seed=4)
    long = build_chat(tmp_path / "long", tokenizer, short.num_tokens + 1, seed=4)
    assert short.num_documents == CONVERSATIONS_PER_BLOCK
    assert long.num_documents == 2 * CONVERSATIONS_PER_BLOCK
    assert long.tokens[: short.num_tokens].tolist() == short.tokens.tolist()
    block = encode_batch(tokenizer, ChatSource(4).block(1))
    assert block.mask is not None
    assert long.tokens[short.num_tokens :].tolist() == block.ids.tolist()
    assert long.mask is not None
    assert long.mask[short.num_tokens :].tolist() == block.mask.tolist()
    assert long.manifest["sources"]["questions"].keys() == set(FAMILIES)


@pytest.mark.multiproc
def test_workers_write_the_same_chat_file(tokenizer: K3Tokenizer, tmp_path: Path) -> None:
    one, two = (
        build_chat(tmp_path / str(workers), tokenizer, 100_000, seed=4, workers=workers)
        for workers in (1, 2)
    )
    assert one.manifest == two.manifest


def test_stdlib_file_holds_the_training_files(
    tokenizer: K3Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdlib, "root", lambda: Path(json.__file__).parent)
    library = {path.name: path.read_text() for path in stdlib.root().glob("*.py")}
    kept = {name: text for name, text in sorted(library.items()) if not stdlib.is_held_out(name)}
    file = build_stdlib(tmp_path / "stdlib", tokenizer)
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in kept.items()}
    assert dict(file.names()) == hashes
    documents = [file.document(index) for index in range(file.num_documents)]
    assert [tokenizer.decode(ids[1:-1]) for ids in documents] == list(kept.values())
    assert {(ids[0], ids[-1]) for ids in documents} == {(tokenizer.bos_id, tokenizer.eos_id)}
    TokenFile.open(file.path).verify()
