"""`k3 train tokenizer` and `k3 train data`: the corpus of a run, without any download."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from k3_core.errors import K3Error

NUM_BASE_TOKENS = 3840

data_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)

BaseTokens = Annotated[int, typer.Option(help="Tokens below the 256 special slots.")]
Seed = Annotated[int, typer.Option(help="Of what is drawn.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Option of the source: key=value.")]
Rules = Annotated[list[str] | None, typer.Option("--rule", help="Setting of cleaning: key=value.")]


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
    source: Annotated[str, typer.Argument(help="Its name: `k3 train data sources` lists them.")],
    out: Annotated[Path, typer.Option(help="Folder of the token files.")],
    tokenizer: Annotated[Path, typer.Option(help="Rank file, as `k3 train tokenizer` writes it.")],
    name: Annotated[str, typer.Option(help="Of the token file; the source's if empty.")] = "",
    num_base_tokens: BaseTokens = NUM_BASE_TOKENS,
    tokens: Annotated[int, typer.Option(help="Stop after so many tokens; 0 for all.")] = 0,
    sets: Sets = None,
    clean: Annotated[bool, typer.Option(help="Drop what the rules of cleaning name.")] = True,
    rules: Rules = None,
    quality: Annotated[Path | None, typer.Option(help="File of a quality classifier.")] = None,
    classifier: Annotated[str, typer.Option(help="Which one reads it.")] = "hashed_linear",
    workers: Annotated[int, typer.Option(help="Processes; 0 for one per CPU.")] = 0,
    shard_tokens: Annotated[int, typer.Option(help="Tokens of a shard; 0 for one file.")] = 0,
) -> None:
    """Write the token file OUT/NAME and the tokenizer's files; an existing one is replaced."""
    from k3_core.tokenizer import K3Tokenizer
    from k3_train.data.corpus import build_corpus
    from k3_train.data.progress import BuildProgress
    from k3_train.data.sources.open import open_source

    found = open_source(source, sets=sets or ())
    encoder = K3Tokenizer.from_ranks(tokenizer, num_base_tokens)
    encoder.save_pretrained(out)
    progress = BuildProgress(name or source, tokens or None)
    file = build_corpus(
        out / (name or source),
        encoder,
        found,
        kind=source,
        num_tokens=tokens or None,
        cleaner=_cleaner(rules, quality, classifier) if clean else None,
        workers=workers or os.cpu_count() or 1,
        shard_tokens=shard_tokens or None,
        progress=progress,
    )
    progress.close()
    _print_row(file.path.name, file.manifest)
    _print_cleaning(file.manifest["sources"].get("cleaning"))


@data_app.command()
def quality(
    good: Annotated[Path, typer.Option(help="Texts to keep: a file or folder, as `local` reads.")],
    bad: Annotated[Path, typer.Option(help="Texts to drop.")],
    out: Annotated[Path, typer.Option(help="Classifier file to write (safetensors).")],
    text_key: Annotated[str, typer.Option(help="Key or column of the text.")] = "text",
    seed: Seed = 0,
) -> None:
    """Train the small quality classifier that `build --quality` uses; prints its accuracy."""
    from k3_train.data.clean.quality import HashedLinear, holdout_accuracy
    from k3_train.data.sources.local import LocalSource

    texts = [[one.text for one in LocalSource(str(p), text_key).entries()] for p in (good, bad)]
    accuracy = holdout_accuracy(*texts, seed=seed)
    HashedLinear.train(*texts, seed=seed).save(out)
    print(
        f"{out}: {len(texts[0])} good and {len(texts[1])} bad texts, held-out {accuracy:.1%} right"
    )


@data_app.command()
def sources() -> None:
    """The sources that `build` knows, with their options."""
    from k3_core.plugins import resolve
    from k3_train.data.sources.open import source_names, source_options

    for name in source_names():
        print(f"{name}: {resolve('dataset', name).chosen.summary}")
        for option, default in source_options(name).items():
            print(f"  {option} = {default}")


@data_app.command()
def renders(
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    scenes: Annotated[int, typer.Option(help="Pictures.", min=1)] = 1000,
    side: Annotated[int, typer.Option(help="Width and height in pixels.", min=16)] = 112,
    seed: Seed = 0,
) -> None:
    """Draw pictures with the code that draws them and questions about coordinates."""
    from k3_train.data.renders import write_pairs

    found = write_pairs(out, scenes, seed, size=(side, side))
    print(f"{out}: {scenes} pictures, {3 * scenes} questions; left out {found['num_alike']} alike")


@data_app.command()
def check(
    path: Annotated[Path, typer.Argument(help="JSONL, Parquet, text or token file, or a folder.")],
    text_key: Annotated[str, typer.Option(help="Key or column of the text.")] = "text",
    max_problems: Annotated[int, typer.Option(help="Stop after so many.", min=1)] = 20,
) -> None:
    """Name the line, the column and what is wrong; verify the hashes of token files."""
    from itertools import islice

    from k3_train.data.check import check_file, check_token_files

    if path.is_dir():
        names = check_token_files(path)
        return print(f"{path}: {', '.join(names)} as the manifest says")
    problems = list(islice(check_file(path, text_key), max_problems))
    for problem in problems:
        print(f"{path}:{problem}")
    if problems:
        count = f"{len(problems)} problems" if len(problems) < max_problems else "stopped there"
        raise K3Error(f"{path} is not fit for training: {count}")
    print(f"{path}: no problem")


@data_app.command()
def stats(
    folder: Annotated[Path, typer.Argument(help="Folder of token files.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    verify: Annotated[bool, typer.Option(help="Compare the parts with their sha256.")] = False,
) -> None:
    """Counts of every token file in FOLDER."""
    from k3_train.data.token_file import token_files

    found = token_files(folder)
    if not found:
        raise K3Error(f"{folder} holds no token file: build them with `k3 train data build`")
    rows = {}
    for name, file in found.items():
        if verify:
            file.verify()
        row = {key: value for key, value in file.manifest.items() if key != "sources"}
        cleaning = file.manifest["sources"].get("cleaning")
        row |= {"kind": file.manifest["sources"].get("kind"), "cleaning": cleaning}
        rows[name] = row
    if as_json:
        return print(json.dumps(rows, indent=1))
    for name, row in rows.items():
        _print_row(name, row)
        _print_cleaning(row["cleaning"])


def _cleaner(rules: list[str] | None, quality: Path | None, classifier: str) -> Any:
    from k3_core.config import apply_overrides, load_dataclass
    from k3_core.plugins import resolve
    from k3_train.data.clean.pipeline import Cleaner
    from k3_train.data.clean.settings import CleanSettings

    settings = load_dataclass(CleanSettings, apply_overrides({}, rules or ()), "rule")
    scorer = resolve("quality_classifier", classifier).load()(quality) if quality else None
    return Cleaner(settings, scorer)


def _print_row(name: str, row: Any) -> None:
    num_tokens, num_documents = row["num_tokens"], row["num_documents"]
    print(
        f"{name}: {num_tokens:,} tokens in {num_documents:,} documents "
        f"({num_tokens / num_documents:.0f} each), loss on {row['num_loss_tokens']:,}"
        + (f", {row['images']['count']:,} pictures" if "images" in row else "")
    )


def _print_cleaning(report: Any) -> None:
    if report:
        counts = sorted(report["dropped"].items())
        dropped = ", ".join(f"{count:,} {rule}" for rule, count in counts) or "none"
        print(f"  kept {report['kept']:,} of {report['read']:,} documents; dropped {dropped}")
