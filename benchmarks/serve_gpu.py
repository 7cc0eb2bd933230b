"""Decode and prefill of the engine on a GPU, beside the byte floor and the number of launches.

    python benchmarks/serve_gpu.py --out serve_gpu.json
    python benchmarks/serve_gpu.py --profile                  the kernels that take the time, too

A model of random weights (k3-mini unless said) in bfloat16. Decode: all requests of a batch in one
step, replayed as a CUDA graph; `graph_us` is the device's time of a step, `step_us` all of it with
planning, drawing and the copy of the tokens to the host. The floor of a step is the bytes that it
has to move at this run's copy rate: every weight but experts and embeddings once, the experts that
the step's tokens chose once, KDA states and windows in and out, latents of the context in. Prefill:
one request of so many tokens, from its submission to its first token.
"""

import argparse
import cProfile
import io
import json
import pstats
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernels_timing as timing
import torch

from k3_core.config import K3Config
from k3_core.engine import Request, Sampling
from k3_core.engine.sequence import Sequence
from k3_core.model import K3ForConditionalGeneration
from k3_core.moe.experts import ExpertBank
from k3_core.moe.router import Router
from k3_serve.engine.classes import RequestClass
from k3_serve.engine.core import ContinuousEngine
from k3_serve.engine.plan import StepPlan
from k3_serve.engine.runner import StepLogits
from k3_serve.testing import SteppedEngine

CONTEXTS = {1: (1024,), 8: (1024,), 64: (1024, 8192, 32768)}
"""Tokens of context a sequence, by the number of sequences."""
OUTPUT = 1024
"""Tokens that a sequence may add to its context: none ends while others are still in prefill."""
ALIKE = (RequestClass("all", 1 << 62, 1, 1.0, 1 << 62),)
"""Prompts of every length may hold all slots: by default longer ones leave some to short ones."""
LAUNCH_US = 2.0
"""What a launch inside a graph is taken to cost at most, in the goal for one sequence."""


class BenchEngine(SteppedEngine):
    """Without the test double's records, on a cache of zeros."""

    def spoil(self) -> None:
        """Leaves the cache as it is."""

    def _finish_step(self, plan: StepPlan, logits: StepLogits) -> None:
        self.plans = [plan]
        ContinuousEngine._finish_step(self, plan, logits)

    def _draw(self, sequences: list[Sequence], logits_BV: torch.Tensor) -> None:
        ContinuousEngine._draw(self, sequences, logits_BV)


def build(name: str, max_length: int) -> K3ForConditionalGeneration:
    """The preset with random weights."""
    torch.manual_seed(0)
    config = K3Config.preset(name)
    model = K3ForConditionalGeneration(config, device="cuda", dtype=torch.bfloat16)
    if config.text.max_position_embeddings < max_length:
        raise SystemExit(f"{name} takes {config.text.max_position_embeddings} tokens")
    return model


def request(number: int, num_tokens: int, max_tokens: int, vocabulary: int) -> Request:
    """Token ids that differ between requests."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, vocabulary, (num_tokens,), generator=generator).tolist()
    return Request(tuple(ids), Sampling(max_tokens=max_tokens, temperature=0.0))


def experts_hit(model: K3ForConditionalGeneration, run: Any) -> int:
    """Experts that one step reads, summed over the layers."""
    chosen: list[int] = []
    handles = [
        module.register_forward_hook(
            lambda _m, _i, routes: chosen.append(routes.idx_Tk.unique().numel())
        )
        for module in model.modules()
        if isinstance(module, Router)
    ]
    run()
    for handle in handles:
        handle.remove()
    return sum(chosen)


def step_bytes(
    model: K3ForConditionalGeneration, engine: BenchEngine, rows: int, context: int, hit: int
) -> int:
    """Bytes that a decode step of `rows` sequences of about `context` tokens has to move."""
    banks = list(model.expert_banks())
    in_banks = {id(p) for bank in banks for p in bank.parameters()}
    skipped = in_banks | {id(model.language_model.model.embed_tokens.weight)}
    weights = sum(p.nbytes for p in model.parameters() if id(p) not in skipped)
    bank: ExpertBank = banks[0]
    expert = sum(p.nbytes for p in bank.parameters()) // bank.num_experts
    layout = engine._runner.layout
    states = 2 * layout.row_bytes
    latents = context * layout.page_bytes // layout.page_tokens
    return weights + hit * expert + rows * (states + latents)


def kernels(run: Any) -> tuple[int, str]:
    """Device activities of one run, and a table of those that take most."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    totals: dict[str, list[float]] = {}
    for event in events:
        totals.setdefault(event.name[:70], []).append(event.device_time_total)
    lines = sorted(totals.items(), key=lambda item: -sum(item[1]))[:30]
    return len(events), "\n".join(f"{sum(t):9.1f} us {len(t):5d} x  {n}" for n, t in lines)


def host_functions(run: Any, count: int) -> str:
    """The Python functions that take most of `count` runs, in their own time."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(count):
        run()
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
    return text.getvalue()


def decoding_engine(model: K3ForConditionalGeneration, rows: int, context: int) -> BenchEngine:
    """An engine whose next steps are decodes of so many sequences."""
    most_tokens = context + OUTPUT
    # k3-mini's latents take 1.1 KiB a token; the states and their checkpoints fit beside them.
    cache_bytes = (8 << 30) + 3 * 1024 * rows * most_tokens
    engine = BenchEngine(
        model,
        max_batch=rows,
        max_length=most_tokens,
        cache_bytes=cache_bytes,
        token_budget=8192,
        classes=ALIKE,
    )
    vocabulary = model.config.text.vocab_size - 256
    for number in range(rows):
        engine.submit(request(number, context, OUTPUT, vocabulary))
    begin, num_steps = time.perf_counter(), 0
    while not engine.plans or len(engine.plans[-1].decodes) < rows:
        if not engine.step():
            raise RuntimeError(f"the requests ended before {rows} decoded at once")
        num_steps += 1
    seconds = time.perf_counter() - begin
    print(f"{rows} prompts of {context} tokens: {num_steps} steps, {seconds:.1f} s", flush=True)
    for _ in range(5):
        engine.step()
    return engine


def decode_row(
    model: K3ForConditionalGeneration, rows: int, context: int, rate: float, is_profiled: bool
) -> dict:
    """Times of a step of so many sequences."""
    engine = decoding_engine(model, rows, context)
    graphs = engine._runner._graphs
    assert graphs is not None
    graph = max(graphs._graphs.items())[1]
    graph_us = timing.event_us(graph.replay, 50)
    begin, count = time.perf_counter(), 50
    for _ in range(count):
        engine.step()
    torch.cuda.synchronize()
    step_us = (time.perf_counter() - begin) / count * 1e6
    if is_profiled:
        print(host_functions(engine.step, 20), flush=True)
    engine._runner._graphs = None
    hit = experts_hit(model, engine.step)
    num_kernels, table = kernels(engine.step)
    engine._runner._graphs = graphs
    num_bytes = step_bytes(model, engine, rows, context, hit)
    floor = num_bytes / rate * 1e6
    allowed = {1: 1.3 * (floor + LAUNCH_US * num_kernels), 64: 2 * floor}
    result = {
        "row": f"decode B={rows}, {context} tokens",
        "graph_us": graph_us,
        "step_us": step_us,
        "floor_us": floor,
        "bytes": num_bytes,
        "launches": num_kernels,
        "allowed_us": allowed.get(rows),
        "tokens_per_second": rows / step_us * 1e6,
    }
    print(result, flush=True)
    if is_profiled:
        print(table, flush=True)
    return result


def prefill_row(model: K3ForConditionalGeneration, tokens: int, is_profiled: bool) -> dict:
    """Tokens a second of a prompt, the second of two runs."""
    engine = BenchEngine(
        model, max_batch=2, max_length=tokens + 64, cache_bytes=8 << 30, token_budget=8192
    )
    vocabulary = model.config.text.vocab_size - 256
    for number in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.submit(request(100 * tokens + number, tokens, 1, vocabulary))
        engine.run()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    result = {"row": f"prefill {tokens}", "seconds": seconds, "tokens_per_second": tokens / seconds}
    print(result, flush=True)
    if is_profiled:
        engine.submit(request(7, tokens, 1, vocabulary))
        print(kernels(engine.run)[1], flush=True)
    return result


def rows_of(model: K3ForConditionalGeneration, rate: float, is_profiled: bool) -> Iterator[dict]:
    """All rows."""
    for rows, contexts in CONTEXTS.items():
        for context in contexts:
            yield decode_row(model, rows, context, rate, is_profiled)
            torch.cuda.empty_cache()
    for tokens in (8192, 65536):
        yield prefill_row(model, tokens, is_profiled)
        torch.cuda.empty_cache()


def main() -> None:
    """Run the rows and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="k3-mini")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rate = timing.copy_rate()
    model = build(args.model, 65536 + 64)
    torch.cuda.empty_cache()
    results = []
    for result in rows_of(model, rate, args.profile):
        results.append(result)
        if args.out:
            record = {**timing.run_record(), "copy_rate": rate, "rows": results}
            args.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
