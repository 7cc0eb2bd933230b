"""The rows of benchmarks/kernels_ops.py, with the tiles that a sweep tries."""

from collections.abc import Callable
from functools import partial

import kernels_ops_cases as cases
import kernels_step_cases as step_cases
from kernels_row import Row, choices
from kernels_training_rows import TRAINING_ROWS

from k3_kernels.attn_res import op as attn_res_op
from k3_kernels.attn_res import phases
from k3_kernels.latent_router import op as latent_op
from k3_kernels.linear_cross_entropy import op as loss_op
from k3_kernels.mla_decode import op as decode_op
from k3_kernels.mla_prefill import forward as prefill_forward
from k3_kernels.moe_experts import op as experts_op
from k3_kernels.mx_quantize import op as quantize_op
from k3_kernels.newton_schulz import op as newton_schulz_op
from k3_kernels.short_conv import op as conv_op
from k3_kernels.situ_glu import op as glu_op

_Expert = experts_op.Tile


def expert_choices(tiles: list[_Expert]) -> tuple[Callable[[], str], ...]:
    """One tile for every average, every width and both kinds of weights."""
    return tuple(partial(only_tile, tile) for tile in tiles)


def only_tile(tile: experts_op.Tile) -> str:
    """Have every call of moe_experts take this tile."""
    experts_op.TILES, experts_op.NARROW = ((float("inf"), tile, tile),), 0
    return str(tile)


SMALL_PACKED = expert_choices(
    [
        _Expert(16, 64, 32, 4, 4),
        _Expert(16, 64, 32, 4, 3),
        _Expert(16, 64, 32, 4, 2),
        _Expert(16, 64, 16, 4, 3),
        _Expert(16, 64, 16, 4, 4),
        _Expert(16, 128, 16, 4, 3),
        _Expert(16, 128, 16, 8, 3),
        _Expert(16, 128, 16, 8, 4),
        _Expert(16, 128, 32, 8, 2),
        _Expert(8, 64, 32, 4, 3),
        _Expert(8, 64, 16, 4, 4),
    ]
)
LARGE = expert_choices(
    [
        _Expert(64, 128, 64, 4, 3),
        _Expert(64, 128, 64, 8, 3),
        _Expert(128, 64, 64, 8, 3),
        _Expert(128, 128, 64, 8, 3),
        _Expert(128, 128, 64, 8, 2),
        _Expert(128, 128, 32, 8, 3),
        _Expert(128, 128, 16, 8, 3),
        _Expert(256, 64, 64, 8, 3),
    ]
)


MINI = (480, 192, 256)
"""Experts of k3-mini, of which a decode step of 64 sequences reads most, for one row each."""
ROUTER, MLA = (512, 256, 480), (8, 128, 64)
"""Its router and its attention."""
SMALL_PLAIN = expert_choices(
    [
        _Expert(16, 64, 128, 4, 4),
        _Expert(16, 64, 128, 4, 3),
        _Expert(16, 64, 128, 4, 2),
        _Expert(16, 64, 64, 4, 4),
        _Expert(16, 64, 64, 4, 3),
        _Expert(16, 64, 64, 4, 2),
        _Expert(16, 64, 256, 4, 2),
        _Expert(16, 128, 64, 4, 3),
        _Expert(16, 128, 64, 8, 3),
        _Expert(16, 64, 32, 4, 4),
    ]
)


def _never(*tensors: object) -> bool:
    """Plain Triton, where the op's rule would choose Gluon."""
    return False


# The last choice is what stays.
PREFILL = choices(prefill_forward, "uses_gluon", [_never, prefill_forward.uses_gluon])
DECODE = choices(decode_op, "PROGRAM_TILES", [0, 20, 6]) + choices(
    decode_op, "uses_gluon", [_never, decode_op.uses_gluon]
)


def both(tile: decode_op.Tile, programs: int) -> str:
    """A tile of 16-bit values and the programs that pieces are cut for."""
    decode_op.TILE_FEW_HEADS, decode_op.PROGRAMS_PER_PROCESSOR = tile, programs
    return f"{tile} {programs}"


_Heads = decode_op.Tile
DECODE_MINI = tuple(
    partial(both, _Heads(16, tokens, warps, stages), programs)
    for programs in (2, 4, 8)
    for tokens, warps, stages in ((64, 8, 2), (64, 4, 2), (64, 4, 3), (32, 4, 3), (128, 8, 2))
)
CONV = choices(
    conv_op,
    "TILE",
    [
        conv_op.Tile(8, 4, 256, 4),
        conv_op.Tile(8, 4, 256, 4, 128),
        conv_op.Tile(8, 8, 256, 8, 128),
        conv_op.Tile(8, 4, 128, 2, 128),
        conv_op.Tile(4, 4, 256, 4),
        conv_op.Tile(4, 4, 256, 4, 96),
        conv_op.Tile(4, 8, 256, 8, 96),
    ],
)
MIX = choices(attn_res_op, "MAX_REGISTERS", [128, 64, 96, 168, 255])
BLOCKS = choices(
    phases,
    "TILE",
    [
        phases.Tile(16, 128, 4, 256, 4),
        phases.Tile(16, 128, 4, 512, 4),
        phases.Tile(16, 128, 4, 512, 8),
        phases.Tile(16, 256, 4, 256, 8),
        phases.Tile(16, 64, 4, 256, 2),
        phases.Tile(32, 128, 4, 128, 4),
    ],
)
GLU = choices(glu_op, "TILE", [(2048, 4), (1024, 4), (1024, 2), (4096, 8), (4096, 4)])
QUANTIZE = choices(quantize_op, "TILE", [(64, 4), (128, 4), (256, 4), (256, 8), (64, 2), (32, 4)])
LOSS = choices(
    loss_op,
    "TILE",
    [loss_op.Tile(*tile) for tile in ((8192, 16), (8192, 32), (32768, 32), (4096, 8), (16384, 32))],
)
SYMMETRIC = choices(
    newton_schulz_op,
    "TILE",
    [
        newton_schulz_op.Tile(128, 256, 64, 8, 3),
        newton_schulz_op.Tile(128, 128, 64, 8, 4),
        newton_schulz_op.Tile(128, 128, 64, 4, 3),
        newton_schulz_op.Tile(128, 256, 64, 8, 4),
    ],
)


_Latent = latent_op.Tile


def latent_choices(tiles: list[_Latent]) -> tuple[Callable[[], str], ...]:
    """One tile for every number of tokens."""
    return choices(latent_op, "TILES", [((float("inf"), tile),) for tile in tiles])


LATENT_MINI = latent_choices(
    [
        _Latent(64, 128, 64, 4, 4, 4),
        _Latent(64, 128, 64, 1, 4, 4),
        _Latent(64, 64, 64, 1, 4, 4),
        _Latent(64, 64, 128, 1, 4, 3),
        _Latent(32, 64, 64, 1, 4, 4),
        _Latent(32, 64, 128, 1, 4, 3),
        _Latent(16, 64, 128, 1, 4, 4),
        _Latent(16, 64, 64, 2, 4, 4),
    ]
)
LATENT_MANY = latent_choices(
    [
        _Latent(256, 128, 64, 1, 8, 4),
        _Latent(256, 128, 64, 1, 8, 3),
        _Latent(128, 256, 64, 1, 8, 4),
        _Latent(128, 256, 64, 1, 8, 3),
        _Latent(128, 128, 64, 1, 8, 4),
        _Latent(128, 128, 64, 1, 4, 3),
        _Latent(128, 128, 128, 1, 8, 3),
    ]
)
LATENT_FEW = latent_choices(
    [
        _Latent(64, 128, 64, 4, 4, 4),
        _Latent(64, 128, 64, 4, 8, 4),
        _Latent(64, 128, 128, 4, 4, 2),
        _Latent(64, 128, 128, 4, 8, 4),
        _Latent(64, 128, 64, 7, 4, 4),
        _Latent(64, 64, 64, 2, 4, 6),
        _Latent(64, 64, 128, 2, 4, 3),
        _Latent(64, 64, 64, 4, 4, 4),
    ]
)


def latent(tokens: int, **named: tuple) -> Callable[..., cases.Case]:
    """Down-projection and router of some tokens."""
    return partial(cases.latent_case, tokens=tokens, **named)


def experts(
    rows: int, is_packed: bool, is_whole: bool, full: tuple[int, int, int] = (112, 3072, 3584)
) -> Callable[..., cases.Case]:
    """A routed-experts case."""
    named = {"is_packed": is_packed, "is_whole": is_whole, "full": full}
    return partial(cases.experts_case, rows=rows, **named)


def prefill(tokens: int, heads: int) -> Callable[..., cases.Case]:
    """An attention case."""
    return partial(cases.prefill_case, tokens=tokens, heads=heads)


def decode(rows: int, context: int, **named: tuple) -> Callable[..., cases.Case]:
    """A paged decode case."""
    return partial(cases.decode_case, rows=rows, context=context, **named)


def newton_schulz(*shape: int) -> Callable[..., cases.Case]:
    """Five steps of the optimizer's iteration on a stack of matrices."""
    return partial(step_cases.newton_schulz_case, shape=shape)


_rounded_logits = partial(step_cases.loss_case, is_rounded=True)

ROWS = (
    Row("attn_res 2 sources", partial(cases.attn_res_case, num_sources=2), 271, None, MIX),
    Row("attn_res 5 sources", partial(cases.attn_res_case, num_sources=5), 500, None, MIX),
    Row("attn_res 9 sources", partial(cases.attn_res_case, num_sources=9), 650, 360, MIX),
    Row("attn_res merge", cases.merge_case),
    Row("attn_res blocks 24 sites", cases.blocks_case, None, None, BLOCKS),
    Row("short_conv", partial(cases.conv_case, is_normed=False), 412, 130, CONV),
    Row("short_conv with q, k norm", partial(cases.conv_case, is_normed=True), None, None, CONV),
    Row("gated_rms_norm", cases.norm_case),
    Row("situ_glu", cases.glu_case, None, None, GLU),
    Row("latent_router T=8192", latent(8192), None, None, LATENT_MANY),
    Row("latent_router T=64", latent(64), None, None, LATENT_FEW),
    Row("latent_router T=1", latent(1)),
    Row("latent_router of k3-mini T=64", latent(64, full=ROUTER), None, None, LATENT_MINI),
    Row("route_topk 896 top-16", cases.route_case, None, 30),
    Row("experts up 128 rows MXFP4", experts(128, True, False), 1710, 500, SMALL_PACKED),
    Row("experts up 128 rows bf16", experts(128, False, False), 1710, 1300),
    Row("experts up 4096 rows bf16", experts(4096, False, False), 1580, 1350),
    Row("experts up 4096 rows MXFP4", experts(4096, True, False), 1580, 600, LARGE),
    Row("experts up 32768 rows bf16", experts(32768, False, False), 3270, 3000, LARGE),
    Row("experts up 32768 rows MXFP4", experts(32768, True, False), 3270, None, LARGE),
    Row("experts whole 128 rows MXFP4", experts(128, True, True)),
    Row("experts of k3-mini 512 rows", experts(512, False, True, MINI), None, None, SMALL_PLAIN),
    Row("mla_prefill T=8192 H=96", prefill(8192, 96), 3390, 3500, PREFILL),
    Row("mla_prefill T=32768 H=24", prefill(32768, 24), 13970, None),
    Row("mla_decode B=64 32K", decode(64, 32768), None, 810, DECODE),
    Row("mla_decode B=8 32K", decode(8, 32768), None, None, DECODE),
    Row("mla_decode B=1 128K", decode(1, 131072), None, None, DECODE),
    Row("mla_decode of k3-mini B=64 1K", decode(64, 1088, full=MLA), None, None, DECODE_MINI),
    Row("mla_decode of k3-mini B=64 32K", decode(64, 32768, full=MLA), None, None, DECODE_MINI),
    *TRAINING_ROWS,
    Row("mx_quantize 16384 x 7168", cases.quantize_case, None, None, QUANTIZE),
    Row("loss fwd+bwd T=8192 V=163840", step_cases.loss_case, 38700, 37000, LOSS),
    Row("loss fwd+bwd, bfloat16 logits", _rounded_logits, 38700, 37000),
    Row("newton_schulz 96 x [128 x 7168]", newton_schulz(96, 128, 7168), 2180, 900),
    Row(
        "newton_schulz 112 x [3072 x 3584]",
        newton_schulz(112, 3072, 3584),
        191600,
        150000,
        SYMMETRIC,
    ),
)
