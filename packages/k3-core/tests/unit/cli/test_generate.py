"""`k3 generate` on a tiny random model with a byte vocabulary."""

import pytest
import torch

from k3_core import K3Config, K3ForConditionalGeneration, K3Tokenizer
from k3_core.cli.app import run
from k3_core.engine import Request, Sampling, SimpleEngine


@pytest.fixture(scope="module")
def tokenizer() -> K3Tokenizer:
    return K3Tokenizer({bytes([i]): i for i in range(256)}, 256)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory) -> str:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(5)
    model = K3ForConditionalGeneration(K3Config.preset("k3-test"), generator=generator)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path, tokenizer=tokenizer)
    return str(path)


def test_it_prints_the_prompt_and_the_engine_s_tokens(folder, tokenizer, capsys) -> None:  # type: ignore[no-untyped-def]
    stops = tuple(tokenizer.stop_ids)
    sampling = Sampling(max_tokens=9, seed=4, top_p=0.8, temperature=0.7, stop_ids=stops)
    with SimpleEngine(K3ForConditionalGeneration.from_pretrained(folder)) as engine:
        (done,) = engine.generate([Request(tuple(tokenizer.encode("ab")), sampling)])
    expected = tokenizer.decode(i for i in done.token_ids if i not in stops)
    options = ["--max-tokens", "9", "--seed", "4", "--top-p", "0.8", "--temperature", "0.7"]
    assert run(["generate", folder, "-p", "ab", *options]) == 0
    assert capsys.readouterr().out == f"ab{expected}\n"


def test_chat_gives_the_same_answer_for_the_same_seed(folder, capsys) -> None:  # type: ignore[no-untyped-def]
    options = ["--chat", "--effort", "low", "--max-tokens", "6", "--seed", "1"]
    shown = []
    for _ in range(2):
        assert run(["generate", folder, "-p", "2+2?", *options]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert shown[0].strip()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-p", ""], "the prompt is empty"),
        (["-p", "x", "--top-p", "0"], "top_p is 0.0"),
        (["-p", "x", "--chat", "--effort", "huge"], "'huge' is not one of"),
        (["-p", "x", "--dtype", "int3"], "int3"),
        (["-p", "x", "--device", "warp"], "device 'warp' is not usable"),
    ],
)
def test_mistakes_are_one_line(folder, capsys, options, message) -> None:  # type: ignore[no-untyped-def]
    assert run(["generate", folder, *options]) == 2
    shown, error = capsys.readouterr()
    assert (shown, message in error) == ("", True)
    assert error.count("\n") == 1
