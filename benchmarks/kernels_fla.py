"""K3's kernels beside fla-core 0.6.0 on the same inputs in the same run.

    pip install k3-kernels[triton,bench]
    python benchmarks/kernels_fla.py --device cuda --out fla.json        the rows of kernels.py
    python benchmarks/kernels_fla.py --device cuda --rows registry,cudnn other public shapes
    TRITON_INTERPRET=1 python benchmarks/kernels_fla.py --device cpu     does it all run? no times

Rows: prefill (at both gates; fla without and with its safe_gate, which is its faster path),
decode, attn_res, conv; registry are the shapes that fla's own benchmark uses, cudnn the ten of
cuDNN's front-end. Times are medians in microseconds: prefill, attn_res and conv of single calls
between two events, decode by graph replay. Gate, L2 norms and the sigmoid of beta are inside
every KDA call; states are float32, in and out. `difference` is the norm of ours minus fla's
output over fla's. fla tunes itself on the first call of each number of heads, which takes longer
than the measurement; the file is written after every row.
"""

import argparse
import importlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import kernels_kda as kda
import kernels_timing as timing
import torch
from kernels_ops_cases import randn
from torch import Tensor

from k3_core.testing import relative_error
from k3_kernels.attn_res.op import attn_res
from k3_kernels.compat.fla import install
from k3_kernels.short_conv.op import short_conv

REPEATS = 50
RAW = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "lower_bound": kda.LOWER_BOUND,
}
# (B, T, H, D) of fla's benchmark, and (T, H, N) of cuDNN's: T tokens in all, N equal sequences.
REGISTRY = (
    (1, 8192, 96, 128),
    (2, 16384, 16, 128),
    (4, 2048, 16, 128),
    (4, 4096, 64, 128),
    (8, 2048, 32, 256),
    (8, 1024, 8, 64),
)
CUDNN = (
    (2048, 12, 1),
    (2048, 16, 1),
    (4096, 8, 1),
    (4096, 12, 1),
    (8192, 12, 4),
    (8192, 16, 1),
    (1024, 4, 1),
    (3072, 10, 1),
    (8192, 24, 1),
    (16384, 16, 8),
)
Result = dict[str, Any]


def peer(path: str, name: str) -> Callable[..., Any]:
    """A function of fla."""
    function: Callable[..., Any] = getattr(importlib.import_module(path), name)
    return function


def chunked_call(row: kda.Chunked, inputs: kda.Inputs, is_safe: bool) -> Callable[[], Any]:
    """fla's call on the inputs of ours: a batch where lengths are equal, packed otherwise."""
    *acts, A_log, dt_bias = inputs.args
    lengths = row.lengths
    named: dict[str, Any] = {**RAW, "safe_gate": is_safe, "output_final_state": True}
    named |= {"A_log": A_log, "dt_bias": dt_bias.flatten(), "state_v_first": True}
    named["initial_state"] = inputs.named["initial_state_NHVK"]
    if len(set(lengths)) == 1:
        batched = [x.unflatten(0, (len(lengths), lengths[0])) for x in acts]
    else:
        batched = [x.unsqueeze(0) for x in acts]
        offsets = inputs.named["cu_seqlens_N1"]
        named |= {"cu_seqlens": offsets, "cu_seqlens_cpu": offsets.cpu()}
    return partial(peer("fla.ops.kda", "chunk_kda"), *batched, **named)


def chunked_rows(rows: tuple[kda.Chunked, ...], dim: int, is_timed: bool) -> Iterator[Result]:
    """Prefill at both gates."""
    device, dtype = ("cuda", torch.bfloat16) if is_timed else ("cpu", torch.float16)
    for row in rows:
        for gate in kda.GATES:
            inputs = kda.draw_chunked(row, gate, dtype, device, dim)
            ours = partial(kda.kda_chunk, *inputs.args, **inputs.named)
            theirs = {
                "fla": chunked_call(row, inputs, False),
                "fla_safe": chunked_call(row, inputs, True),
            }
            result = {"row": f"kda_chunk {row.name}", "gate": gate}
            result["floor_bytes"] = kda.chunked_bytes(row, dim)
            yield measure(result, ours, theirs, is_timed)


def decode_call(row: kda.Decode, inputs: partial, is_safe: bool = False) -> Callable[[], Any]:
    """fla's paged decode on the arguments of a kda_step call."""
    *acts, A_log, dt_bias = inputs.args
    flat = [x.transpose(0, 1) for x in acts]
    named = {"A_log": A_log, "dt_bias": dt_bias.flatten(), "state_v_first": True, **RAW}
    named |= {"initial_state": inputs.keywords["state_SHVK"]}
    named["ssm_state_indices"] = inputs.keywords["slots_B"]
    offsets = torch.arange(row.rows + 1, device=acts[0].device)
    function = peer("fla.ops.kda.fused_recurrent", "fused_recurrent_kda_fwd")
    return partial(function, *flat, cu_seqlens=offsets, **named)


def decode_rows(rows: tuple[kda.Decode, ...], dim: int, is_timed: bool) -> Iterator[Result]:
    """Graph replay on one set of states and rotating over more than the cache holds."""
    device, dtype = ("cuda", torch.bfloat16) if is_timed else ("cpu", torch.float16)
    for row in rows:
        for is_rotating in (False, True) if is_timed else (False,):
            draws = kda.draw_step(row, is_rotating, dtype, device, dim)
            ours = draws * max(1, 10 // len(draws))
            theirs = [decode_call(row, draw) for draw in draws] * (len(ours) // len(draws))
            name = f"kda_step B={row.rows} H={row.num_heads}" + " rotating" * is_rotating
            result: Result = {"row": name, "gate": "fast"}
            result["floor_bytes"] = kda.decode_bytes(row, dim)
            result["difference"] = decode_difference(draws[0], theirs[0])
            if is_timed:
                result["ours_us"] = timing.graph_us(ours, REPEATS)
                result["fla_us"] = timing.graph_us(theirs, REPEATS)
            yield result


def decode_difference(ours: partial, theirs: Callable[[], Any]) -> float:
    """Of the outputs, each from the same states."""
    pool = ours.keywords["state_SHVK"]
    before = pool.clone()
    first = output(ours()).clone()
    pool.copy_(before)
    second = output(theirs())
    pool.copy_(before)
    return relative_error(first.reshape(second.shape), second)


def attn_res_rows(is_timed: bool) -> Iterator[Result]:
    """The mix of 2, 5 and 9 sources."""
    tokens, width = (8192, 7168) if is_timed else (3, 48)
    device, dtype = ("cuda", torch.bfloat16) if is_timed else ("cpu", torch.float16)
    like = {"device": device, "dtype": dtype}
    for count in (2, 5, 9):
        values = [randn(tokens, width, **like) for _ in range(count)]
        norm, proj = randn(width, **like), randn(1, width, **like, scale=0.05)
        theirs = partial(peer("fla.ops.attnres", "fused_attnres"), proj[0], values, norm)
        result: Result = {"row": f"attn_res {count} sources", "gate": ""}
        result["floor_bytes"] = (count + 1) * values[0].nbytes
        ours = partial(attn_res, values, norm, proj, eps=1e-6)
        yield measure(result, ours, {"fla": theirs}, is_timed)


def conv_rows(is_timed: bool) -> Iterator[Result]:
    """Width 4 and SiLU."""
    tokens, channels = (8192, 12288) if is_timed else (9, 48)
    device, dtype = ("cuda", torch.bfloat16) if is_timed else ("cpu", torch.float16)
    x = randn(tokens, channels, device=device, dtype=dtype)
    weight = randn(channels, 1, 4, device=device, dtype=dtype, scale=0.5)
    offsets = torch.tensor([0, tokens], device=device, dtype=torch.int32)
    ours = partial(short_conv, x, weight, cu_seqlens_N1=offsets, seqlens=(tokens,))
    conv = peer("fla.modules.convolution", "causal_conv1d")
    theirs = partial(conv, x[None], weight[:, 0], activation="silu")
    result: Result = {"row": "conv", "gate": "", "floor_bytes": 2 * x.nbytes}
    yield measure(result, ours, {"fla": theirs}, is_timed)


def output(value: Tensor | tuple) -> Tensor:
    """The first result of a call."""
    return value[0] if isinstance(value, tuple) else value


def measure(
    result: Result,
    ours: Callable[[], Any],
    theirs: dict[str, Callable[[], Any]],
    is_timed: bool,
) -> Result:
    """Differences and, on a GPU, times; what goes wrong with a peer is kept as text."""
    own = output(ours())
    if is_timed:
        result["ours_us"] = timing.event_us(ours, REPEATS)
        result["ours_graph_us"] = timing.graph_us([ours], REPEATS)
    for name, call in theirs.items():
        try:
            other = output(call())
            result["difference"] = relative_error(own.reshape(other.shape), other)
            if is_timed:
                result[f"{name}_us"] = timing.event_us(call, REPEATS)
        except Exception as error:  # a peer that cannot run a shape is a result
            result[f"{name}_failure"] = f"{type(error).__name__}: {error}"[:200]
    return result


def chosen_rows(names: list[str], only: str, is_timed: bool) -> Iterator[Result]:
    """The rows of the named groups whose name holds `only`."""
    if not is_timed:
        dry = kda.Chunked("dry", (35, 9), 2, (0, 0), (0, 0))
        yield from chunked_rows((dry,), 32, False)
        yield from decode_rows((kda.Decode(2, 0, 0, num_heads=2),), 32, False)
    elif "prefill" in names:
        yield from chunked_rows(pick(kda.CHUNKED, only), kda.HEAD_DIM, True)
    if is_timed and "decode" in names:
        yield from decode_rows(kda.DECODE, kda.HEAD_DIM, True)
    if "attn_res" in names:
        yield from attn_res_rows(is_timed)
    if "conv" in names:
        yield from conv_rows(is_timed)
    if is_timed and "registry" in names:
        for batch, tokens, heads, dim in REGISTRY:
            name = f"{batch}x{tokens} H={heads} D={dim}"
            row = kda.Chunked(name, (tokens,) * batch, heads, (0, 0), (0, 0))
            yield from chunked_rows(pick((row,), only), dim, True)
    if is_timed and "cudnn" in names:
        for tokens, heads, count in CUDNN:
            lengths = (tokens // count,) * count
            row = kda.Chunked(f"T={tokens} H={heads} N={count}", lengths, heads, (0, 0), (0, 0))
            yield from chunked_rows(pick((row,), only), kda.HEAD_DIM, True)


def pick(rows: tuple[kda.Chunked, ...], only: str) -> tuple[kda.Chunked, ...]:
    """The rows whose name holds `only`."""
    return tuple(row for row in rows if only in row.name)


def line(result: Result, rate: float) -> str:
    """One row of the Markdown table, with the byte floor at the copy rate of this run."""
    names = ("ours_us", "ours_graph_us", "fla_us", "fla_safe_us")
    times = [f"{result[name]:.1f}" if name in result else "-" for name in names]
    best = min((result[n] for n in names[2:] if n in result), default=0.0)
    ratio = f"{best / result['ours_us']:.2f}" if "ours_us" in result else "-"
    floor = f"{result['floor_bytes'] / rate * 1e6:.1f}"
    difference = f"{result['difference']:.1e}" if "difference" in result else "-"
    failures = "; ".join(str(v) for k, v in result.items() if k.endswith("_failure"))
    cells = [result["row"], result["gate"], *times, ratio, floor, difference, failures]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Run the rows, print a table, write JSON."""
    groups = ("prefill", "decode", "attn_res", "conv", "registry", "cudnn")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--rows", default=",".join(groups[:4]), help=f"of {', '.join(groups)}")
    parser.add_argument("--only", default="", help="prefill rows whose name contains this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = args.rows.split(",")
    if unknown := set(names) - set(groups):
        parser.error(f"no rows {', '.join(sorted(unknown))}; use some of {', '.join(groups)}")
    is_timed = args.device == "cuda"
    if not is_timed:  # fla's kernels need a GPU: K3's own functions take their place
        install(override=True)
    rate = timing.copy_rate() if is_timed else float("inf")
    heads = ("row", "gate", "ours", "ours graph", "fla", "fla safe", "fla / ours", "floor")
    print("| " + " | ".join((*heads, "difference", "failed")) + " |\n" + "|---" * 10 + "|")
    results = []
    with torch.no_grad():
        for result in chosen_rows(names, args.only, is_timed):
            results.append(result)
            print(line(result, rate), flush=True)
            if args.out:
                record = timing.run_record() if is_timed else {"device": "cpu"}
                record |= {"copy_rate": rate, "rows": results}
                args.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
