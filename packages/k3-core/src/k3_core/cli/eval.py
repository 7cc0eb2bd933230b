"""`k3 eval nano`: accuracy of a model on unseen questions, and bits per byte on held-out text."""

import sys
from typing import Annotated, Any

import typer

from k3_core.cli.table import print_json, print_table
from k3_core.errors import K3Error

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def evaluate() -> None:
    """Measure a model."""


@app.command()
def nano(
    model: Annotated[str, typer.Option(help="A bundled model or a folder.")] = "k3-nano",
    questions: Annotated[int, typer.Option(min=1, help="Questions of each family.")] = 200,
    seed: Annotated[int, typer.Option(help="Which of the test questions are drawn.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    batch_size: Annotated[int, typer.Option(min=1, help="Questions answered at once.")] = 200,
    text_bytes: Annotated[
        int, typer.Option(help="Bytes of held-out text at least; 0 for none, -1 for all.")
    ] = -1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Greedy answers to unseen questions at every effort; bits per byte beside gzip and xz."""
    result = _measure(model, questions, seed, device, batch_size, text_bytes)
    if as_json:
        print_json(result)
    else:
        _print_tables(result)


def _measure(
    name: str, questions: int, seed: int, device: str, batch_size: int, text_bytes: int
) -> dict[str, Any]:
    import torch

    from k3_core.checkpoint.source import resolve_source
    from k3_core.evaluate.nano import evaluate_nano
    from k3_core.model import K3ForConditionalGeneration
    from k3_core.tokenizer import K3Tokenizer

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise K3Error(f"device {device!r} is not available here; use --device cpu")
    folder = resolve_source(name)
    # Decoded experts give the same numbers as packed ones and are faster in large batches.
    model = K3ForConditionalGeneration.from_pretrained(folder, device=device, experts="dequantized")
    result = evaluate_nano(
        model,
        K3Tokenizer.from_pretrained(folder),
        num_questions=questions,
        seed=seed,
        batch_size=batch_size,
        max_text_bytes=None if text_bytes < 0 else text_bytes,
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return {"model": name, **result}


def _print_tables(result: dict[str, Any]) -> None:
    accuracy, tokens = result["accuracy"], result["tokens_per_answer"]
    efforts = list(next(iter(accuracy.values())))
    rows = [
        [
            family,
            *(f"{100 * shares[effort]:.1f}%" for effort in efforts),
            *(f"{tokens[family][effort]:.0f}" for effort in efforts),
        ]
        for family, shares in accuracy.items()
    ]
    print_table(["family", *efforts, *(f"{effort} tokens" for effort in efforts)], rows)
    text = result["text"]
    if text is not None:
        print(f"\n{text['num_files']} held-out files, {text['num_bytes']:,} bytes")
        print_table(
            ["", "bits per byte"],
            [
                [result["model"], f"{text['bits_per_byte']:.3f}"],
                ["gzip -9", f"{text['gzip_9']:.3f}"],
                ["xz -9e", f"{text['xz']:.3f}"],
            ],
        )
