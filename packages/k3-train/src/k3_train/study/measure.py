"""What a study measures of a trained model, beside the rows of its run.

T tokens, D model width.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3_core.cache.base import KDASpec
from k3_core.model import K3ForConditionalGeneration, SequenceBatch
from k3_train.data.sampler import IGNORE_INDEX, Batch, PackedSampler
from k3_train.data.token_file import TokenFile
from k3_train.packed import packed
from k3_train.precision import training_precision
from k3_train.study.data import heldout_files

PREFILL_REPEATS = 3
BYTES = {"state": 4, "window": 2, "latent": 2}
"""Of a value in a cache: float32 recurrent states, bfloat16 for the rest."""


def measure(
    model: K3ForConditionalGeneration,
    data: Path,
    *,
    eval_tokens: int,
    tokens_per_batch: int,
    max_seq_len: int,
    prefill_tokens: int,
) -> dict[str, float]:
    """Held-out loss, recall accuracy where the data has recall tasks, prefill time, state bytes."""
    files = heldout_files(data)
    model.eval()
    with training_precision(model.device):
        measures = {}
        for name, file in files.items():
            batches = list(_batches(file, eval_tokens, tokens_per_batch, max_seq_len))
            loss, accuracy = score(model, batches)
            measures["loss" if name == "stdlib" else f"{name}_loss"] = loss
            if name == "recall":
                measures["recall_accuracy"] = accuracy
        measures["prefill_ms"] = 1e3 * prefill_seconds(model, prefill_tokens)
    measures["state_bytes"] = state_bytes(model, prefill_tokens)
    return measures


def score(model: K3ForConditionalGeneration, batches: list[Batch]) -> tuple[float, float]:
    """Mean loss in nats and share of right first guesses, over the labels that count.

    With gradients on, by the ops of training: those of inference may have to be compiled first.
    """
    nats = correct = count = 0.0
    for batch in batches:
        sequences = packed(batch, model.device)
        out = model.forward_packed(batch.input_ids.to(model.device), sequences)
        assert out.logits is not None
        logits_TV = out.logits.detach().float()
        labels_T = batch.labels.to(model.device)
        kept_T = labels_T != IGNORE_INDEX
        chosen = logits_TV[kept_T], labels_T[kept_T]
        nats += float(torch.nn.functional.cross_entropy(*chosen, reduction="sum"))
        correct += int((chosen[0].argmax(-1) == chosen[1]).sum())
        count += int(kept_T.sum())
    return nats / max(1.0, count), correct / max(1.0, count)


@torch.no_grad()
def answer_accuracy(model: K3ForConditionalGeneration, batch: Batch) -> dict[str, float]:
    """Share of answers that greedy decoding would give, by what they follow: image, clip or text.

    An answer is a run of labels that count; it is right when every first guess in it is, given the
    right ones before.
    """
    model.eval()
    with training_precision(model.device):
        ids_T = batch.input_ids.to(model.device)
        logits_TV = model.forward_packed(ids_T, packed(batch, model.device)).logits
    assert logits_TV is not None
    is_kept_T = batch.labels != IGNORE_INDEX
    is_right_T = logits_TV.argmax(-1).cpu() == batch.labels
    before_T = torch.cat((is_kept_T.new_zeros(1), is_kept_T[:-1]))
    number_T = (is_kept_T & ~before_T).cumsum(0) - 1  # of the answer
    num_right_A = torch.bincount(number_T[is_kept_T], is_right_T[is_kept_T].double())
    num_kept_A = torch.bincount(number_T[is_kept_T])
    kinds = _kinds(batch, (is_kept_T & ~before_T).nonzero()[:, 0].tolist())
    found: dict[str, list[bool]] = {}
    for kind, is_right in zip(kinds, (num_right_A == num_kept_A).tolist(), strict=True):
        found.setdefault(kind, []).append(is_right)
    return {kind: statistics.fmean(rights) for kind, rights in found.items()}


def _kinds(batch: Batch, places: Sequence[int]) -> list[str]:
    """What is before each place of a batch: the label there is of the token after it."""
    ends = (
        {}
        if batch.images is None
        else {
            stop - 1: "image" if int(grid[0]) == 1 else "clip"
            for (_, stop), grid in zip(batch.images.spans, batch.images.grids, strict=True)
        }
    )
    return [ends.get(place, "text") for place in places]


@torch.no_grad()
def prefill_seconds(model: K3ForConditionalGeneration, num_tokens: int) -> float:
    """Median time of a pass over one sequence, without its logits; the first pass is not timed."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.text.vocab_size
    ids_T = torch.randint(0, vocab_size, (num_tokens,), generator=generator).to(model.device)
    seconds = []
    for _ in range(1 + PREFILL_REPEATS):
        batch = SequenceBatch.from_lengths([num_tokens], device=model.device)
        _wait(ids_T)
        start = time.perf_counter()
        model.forward_packed(ids_T, batch, output_logits=False)
        _wait(ids_T)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def state_bytes(model: K3ForConditionalGeneration, num_tokens: int) -> int:
    """Bytes that serving keeps of one sequence of `num_tokens` tokens."""
    total = 0
    layers = model.language_model.model.layers[: model.config.text.num_hidden_layers]
    for layer in layers:
        spec = layer.self_attn.cache_spec()  # type: ignore[union-attr, operator]
        if isinstance(spec, KDASpec):
            total += BYTES["state"] * spec.num_heads * spec.head_dim**2
            total += BYTES["window"] * spec.conv_channels * (spec.conv_width - 1)
        else:
            total += BYTES["latent"] * spec.width * num_tokens
    return total


def _batches(
    file: TokenFile, num_tokens: int, tokens_per_batch: int, max_seq_len: int
) -> Iterator[Batch]:
    size = min(tokens_per_batch, num_tokens)
    sampler = PackedSampler([file], [1.0], size, max_seq_len, seed=0)
    for index in range(max(1, num_tokens // size)):
        yield sampler.batch(index)


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def from_rows(rows: Sequence[Mapping[str, Any]], load_floor: float) -> dict[str, float]:
    """Measures of the rows of a run.

    load_floor: max over mean of a perfect balance over the tokens of a row's steps, sampling noise
    included; `balanced_at` is the number of tokens from which on 1.3 times that was kept to.
    """
    last = rows[-max(1, len(rows) // 4) :]
    above = [row["tokens"] for row in rows if row["max_over_mean_load"] > 1.3 * load_floor]
    later = [row["tokens"] for row in rows if not above or row["tokens"] > above[-1]]
    return {
        "train_loss": statistics.fmean(row["loss"] for row in last),
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows[1:] or rows),
        "grad_norm_max": max(row["grad_norm"] for row in rows),
        "max_over_mean_load": statistics.fmean(row["max_over_mean_load"] for row in last),
        "dead_experts": statistics.fmean(row["dead_experts"] for row in last),
        "balanced_at": later[0] if later else float("inf"),
    }


def from_snapshots(snapshots: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Measures of the snapshots of a run: the newest state, and the newest step by head.

    head_spread: largest over least head norm of an update, mean over matrices.
    """
    last = snapshots[-1]
    measures = {"activation_max": max(last["out_max"]["mlp"]), "depth_rms": _growth(last)}
    updates = [one["update_norm"] for one in snapshots if one.get("update_norm")]
    if updates:
        ratios = [max(norms) / max(min(norms), 1e-30) for norms in updates[-1].values()]
        measures["head_spread"] = statistics.fmean(ratios)
    return measures


def _growth(snapshot: Mapping[str, Any]) -> float:
    """Root mean square of the last MLP's output over that of the first."""
    outputs = snapshot["out_rms"]["mlp"]
    return float(outputs[-1] / max(outputs[0], 1e-30))
