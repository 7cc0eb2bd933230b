"""`k3 train tokenizer` and `k3 train data`: the corpus of a run, without any download."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from k3_core.errors import K3Error

NUM_BASE_TOKENS = 3840

data_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)

BaseTokens = Annotated[int, typer.Option(help="Tokens below the 256 special slots.")]
Seed = Annotated[int, typer.Option(help="Seed of the generated conversations.")]


def tokenizer(
    out: Annotated[Path, typer.Option(help="Rank file to write (tiktoken format).")],
    num_base_tokens: BaseTokens = NUM_BASE_TOKENS,
    conversations: Annotated[
        int, typer.Option(help="Generated conversations to learn from.")
    ] = 20_000,
    seed: Seed = 0,
) -> None:
    """Train ranks on the standard library and generated conversations; no token has two digits."""
    from k3_train.data.tokenizer_trainer import train_nano_tokenizer

    ranks = train_nano_tokenizer(out, num_base_tokens, conversations, seed)
    longest = max(ranks, key=len)
    print(f"{out}: {len(ranks)} tokens, the longest is {longest.decode('utf-8', 'replace')!r}")


@data_app.command()
def build(
    out: Annotated[Path, typer.Option(help="Folder of the token files.")],
    tokenizer: Annotated[Path, typer.Option(help="Rank file, as `k3 train tokenizer` writes it.")],
    num_base_tokens: BaseTokens = NUM_BASE_TOKENS,
    chat_tokens: Annotated[
        int, typer.Option(help="Tokens of conversations; 0 for none.")
    ] = 30_000_000,
    stdlib: Annotated[bool, typer.Option(help="Build the standard library's file.")] = True,
    workers: Annotated[int, typer.Option(help="Processes; 0 for one per CPU.")] = 0,
    seed: Seed = 0,
) -> None:
    """Write OUT/stdlib, OUT/chat and the tokenizer's files; existing ones are replaced."""
    from k3_core.tokenizer import K3Tokenizer
    from k3_train.data.corpus import build_chat, build_stdlib

    encoder = K3Tokenizer.from_ranks(tokenizer, num_base_tokens)
    encoder.save_pretrained(out)
    if stdlib:
        build_stdlib(out / "stdlib", encoder)
    if chat_tokens:
        workers = workers or os.cpu_count() or 1
        build_chat(out / "chat", encoder, chat_tokens, seed=seed, workers=workers)
    stats(out)


@data_app.command()
def stats(
    folder: Annotated[Path, typer.Argument(help="Folder of token files.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    verify: Annotated[bool, typer.Option(help="Compare the parts with their sha256.")] = False,
) -> None:
    """Counts of every token file in FOLDER."""
    from k3_train.data.token_file import MANIFEST, TokenFile

    found = [TokenFile.open(path.parent) for path in sorted(folder.glob(f"*/{MANIFEST}"))]
    if not found:
        raise K3Error(f"{folder} holds no token file: build them with `k3 train data build`")
    rows = {}
    for file in found:
        if verify:
            file.verify()
        row = {key: value for key, value in file.manifest.items() if key != "sources"}
        rows[file.path.name] = row | {"kind": file.manifest["sources"].get("kind")}
    if as_json:
        return print(json.dumps(rows, indent=1))
    for name, row in rows.items():
        num_tokens, num_documents = row["num_tokens"], row["num_documents"]
        print(
            f"{name}: {num_tokens:,} tokens in {num_documents:,} documents "
            f"({num_tokens / num_documents:.0f} each), loss on {row['num_loss_tokens']:,}"
        )
