"""The KDA rows of benchmarks/kernels.py: draws, floors, stages and the sweep of block sizes.

Draws follow FlashKDA's protocol with both gates. q, k: normalised in float32, then rounded; v and
beta: N(0, 1). Fast gate: raw gate N(0, 1), A_log and dt_bias U(0, 1) (mean log decay about -3).
Slow gate: raw gate N(-6.5, 1), A_log = dt_bias = 0 (about -0.01 a token: long memory).
States are float32, in and out; gate, L2 norms and the sigmoid of beta are inside the call.
Legend: T packed tokens, N sequences, H heads, D = K = V, B rows, S slots, C conv channels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from k3_kernels.kda_chunk.config import PRECISIONS, Blocks, choose_blocks
from k3_kernels.kda_chunk.cpu import kda_chunk as oracle
from k3_kernels.kda_chunk.launch import Gates, run_prep, run_scan
from k3_kernels.kda_chunk.op import kda_chunk
from k3_kernels.kda_chunk.plan import make_plan
from k3_kernels.kda_chunk.workspace import make_tiles
from k3_kernels.kda_decode.op import kda_decode
from k3_kernels.kda_step.config import StepBlocks
from k3_kernels.kda_step.op import kda_step

HEAD_DIM = 128
LOWER_BOUND = -5.0
GATES = ("fast", "slow")
MIXED = (1300, 547, 2048, 963, 271, 3063)


@dataclass(frozen=True)
class Chunked:
    """One prefill row; microseconds: best public at the fast and slow gate, and what we aim at."""

    name: str
    lengths: tuple[int, ...]
    num_heads: int
    public_us: tuple[float, float]
    target_us: tuple[float, float]


@dataclass(frozen=True)
class Decode:
    """One decode row of `rows` sequences at 96 heads."""

    rows: int
    public_us: float
    target_us: float
    num_heads: int = 96


CHUNKED = (
    Chunked("T=8192 H=96", (8192,), 96, (1420, 1470), (1000, 1000)),
    Chunked("T=8192 H=96 mixed", MIXED, 96, (1460, 1460), (1000, 1000)),
    Chunked("8x1024 H=96", (1024,) * 8, 96, (1180, 1180), (950, 950)),
    Chunked("T=65536 H=96", (65536,), 96, (11200, 11200), (7500, 7500)),
    Chunked("T=8192 H=24", (8192,), 24, (290, 990), (280, 450)),
    Chunked("T=65536 H=24", (65536,), 24, (2200, 6000), (1900, 2500)),
)
DECODE = (Decode(1, 10.9, 6), Decode(8, 40.9, 29), Decode(64, 267, 225), Decode(256, 1168, 890))


@dataclass(frozen=True)
class Inputs:
    """Arguments of a call; `named` are its keyword arguments."""

    args: tuple[Tensor, ...]
    named: dict


def _gates(shape: tuple[int, ...], gate: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Raw gate, beta, A_log and dt_bias; `shape` ends in heads and channels."""
    raw = torch.randn(shape, device=device) - (6.5 if gate == "slow" else 0.0)
    beta = torch.randn(shape[:-1], device=device)
    fill = torch.zeros if gate == "slow" else torch.rand
    decay = [fill(shape[-2], device=device), fill(shape[-2:], device=device)]
    return [raw.to(dtype), beta.to(dtype), *decay]


def _heads(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k (normalised) and v."""
    unit = [torch.nn.functional.normalize(torch.randn(shape, device=device), dim=-1) for _ in "qk"]
    return [x.to(dtype) for x in (*unit, torch.randn(shape, device=device))]


def draw_chunked(row: Chunked, gate: str, dtype: torch.dtype, device: str, dim: int) -> Inputs:
    """The inputs of a prefill row."""
    torch.manual_seed(0)
    shape = (sum(row.lengths), row.num_heads, dim)
    args = (*_heads(shape, dtype, device), *_gates(shape, gate, dtype, device))
    offsets = torch.tensor((0, *row.lengths)).cumsum(0).to(device)
    named = {
        "lower_bound": LOWER_BOUND,
        "cu_seqlens_N1": offsets,
        "seqlens": row.lengths,
        "initial_state_NHVK": torch.randn(len(row.lengths), row.num_heads, dim, dim, device=device),
        "output_final_state": True,
    }
    return Inputs(args, named)


def chunked_bytes(row: Chunked, dim: int) -> int:
    """q, k, v, gate, o and beta once in two bytes, states in and out in four."""
    tokens = sum(row.lengths) * row.num_heads * (5 * dim + 1) * 2
    return tokens + len(row.lengths) * row.num_heads * dim * dim * 8


def chunked_error(row: Chunked, inputs: Inputs) -> tuple[float, float]:
    """RMS error ratio of o and of the final state on the first two heads, against float64."""
    heads = slice(0, 2)
    o, final = kda_chunk(*inputs.args, **inputs.named)
    args = [x[:, heads].double() for x in inputs.args[:5]]
    args += [x[heads].double() for x in inputs.args[5:]]
    state = inputs.named["initial_state_NHVK"][:, heads].double()
    expected = oracle(*args, **{**inputs.named, "initial_state_NHVK": state})
    pairs = zip((o[:, heads], final[:, heads]), expected, strict=True)
    ratios = [float((a.double() - b).norm() / b.norm()) for a, b in pairs]
    return ratios[0], ratios[1]


def stages(
    row: Chunked, inputs: Inputs, blocks: Blocks | None = None, segment_chunks: int = 0
) -> dict[str, Callable[[], object]]:
    """The launches of a call by stage, so that each can be timed alone."""
    q, k, v, gate, beta, A_log, dt_bias = inputs.args
    precision = PRECISIONS[q.dtype]
    dim = q.shape[-1]
    blocks = blocks or choose_blocks(dim, dim, precision)
    (slab,) = make_plan(row.lengths, blocks.chunk, segment_chunks, q.device).slabs
    gates = Gates(gate, beta, A_log, dt_bias, LOWER_BOUND)
    tiles = make_tiles(q.device, row.num_heads, dim, slab.num_chunks, True, blocks, precision)
    prep = partial(run_prep, q, k, gates, dim**-0.5, slab, tiles, blocks, precision)
    prep()
    initial = inputs.named["initial_state_NHVK"]
    final, o = torch.empty_like(initial), torch.empty_like(v)
    scan = partial(run_scan, v, o, tiles, slab, initial, final, None, dim, blocks, precision)
    return {"prep": prep, "scan": scan}


def sweep() -> Iterator[Blocks]:
    """Block sizes worth trying at D = 128 in bfloat16; prep and scan are timed apart."""
    for channels, warps, cap in product((16, 32, 64, 128), (1, 2, 4), (None, 168, 128)):
        yield Blocks(32, 128, scan_warps=8, channels=channels, prep_warps=warps, prep_registers=cap)
    for values, warps, depth in product((32, 64, 128), (4, 8), (2, 3, 4)):
        yield Blocks(32, values, scan_warps=warps, scan_stages=depth)


def decode_sets(row: Decode, is_rotating: bool, dim: int) -> int:
    """Sets of slots: one, or as many as hold more than 100 MB of states (past the L2)."""
    state_bytes = row.rows * row.num_heads * dim * dim * 4
    return max(2, -(-100_000_000 // state_bytes)) if is_rotating else 1


STEP_SWEEP = tuple(
    StepBlocks(values, warps)
    for values, warps in ((16, 2), (16, 4), (32, 2), (32, 4), (32, 8), (64, 4), (64, 8), (128, 8))
)


def draw_step(
    row: Decode,
    is_rotating: bool,
    dtype: torch.dtype,
    device: str,
    dim: int,
    blocks: StepBlocks | None = None,
) -> list[Callable[[], object]]:
    """One kda_step call for each set of slots."""
    torch.manual_seed(0)
    num_sets = decode_sets(row, is_rotating, dim)
    shape = (row.rows, 1, row.num_heads, dim)
    args = (*_heads(shape, dtype, device), *_gates(shape, "fast", dtype, device))
    pool = torch.randn(num_sets * row.rows, row.num_heads, dim, dim, device=device)
    named = {"state_SHVK": pool, "lower_bound": LOWER_BOUND, "blocks": blocks}
    slots = torch.arange(num_sets * row.rows, device=device).split(row.rows)
    return [partial(kda_step, *args, slots_B=s, **named) for s in slots]


def draw_fused(
    row: Decode, is_rotating: bool, dtype: torch.dtype, device: str, dim: int
) -> list[Callable[[], object]]:
    """One kda_decode call (convolution to gated norm) for each set of slots."""
    torch.manual_seed(0)
    num_sets, channels = decode_sets(row, is_rotating, dim), 3 * row.num_heads * dim
    shape = (row.rows, 1, row.num_heads, dim)
    args = (
        torch.randn(row.rows, 1, channels, device=device).to(dtype),
        torch.randn(channels, 1, 4, device=device),
        *_gates(shape, "fast", dtype, device),
        torch.randn(shape, device=device).to(dtype),
        torch.ones(dim, device=device),
    )
    num_slots = num_sets * row.rows
    named = {
        "state_SHVK": torch.randn(num_slots, row.num_heads, dim, dim, device=device),
        "window_SCR": torch.randn(num_slots, channels, 3, device=device).to(dtype),
        "lower_bound": LOWER_BOUND,
        "eps": 1e-5,
    }
    slots = torch.arange(num_slots, device=device).split(row.rows)
    return [partial(kda_decode, *args, slots_B=s, **named) for s in slots]


def decode_bytes(row: Decode, dim: int) -> int:
    """States in and out in four bytes; activations are below one percent."""
    return row.rows * row.num_heads * dim * dim * 8
