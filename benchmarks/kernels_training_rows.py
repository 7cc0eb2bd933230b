"""Rows of forward and backward together, with the tiles that a sweep tries."""

from collections.abc import Callable
from functools import partial

import kernels_ops_cases as cases
import kernels_training_cases as training
from kernels_row import Row, choices

from k3_kernels.attn_res import backward as attn_res_backward
from k3_kernels.moe_experts import products as experts_products
from k3_kernels.rms_norm import backward as norm_backward
from k3_kernels.short_conv import backward as conv_backward
from k3_kernels.situ_glu import backward as glu_backward


def _never(*tensors: object) -> bool:
    """Plain Triton, where the op's rule would choose Gluon."""
    return False


# The last choice is what stays.
EXPERTS_TRAINING = choices(experts_products, "uses_gluon", [_never, experts_products.uses_gluon])
CONV_TRAINING = choices(
    conv_backward,
    "TILE",
    [
        conv_backward.Tile(64, 16, 64, 4, 3, 4),
        conv_backward.Tile(32, 16, 64, 4, 4, 4),
        conv_backward.Tile(32, 16, 64, 4, 3, 4, 168),
        conv_backward.Tile(32, 16, 128, 4, 3, 8),
        conv_backward.Tile(16, 16, 64, 4, 3, 4),
        conv_backward.Tile(32, 16, 64, 4, 3, 4),
    ],
)
_RING = attn_res_backward.RING
MIX_TRAINING = choices(
    attn_res_backward,
    "RING",
    [
        _RING._replace(slots=0),  # The kernel in Triton.
        _RING._replace(num_warps=16),
        _RING._replace(slots=13),
        _RING,
    ],
)
NORM_TRAINING = choices(
    norm_backward,
    "NARROW",
    [
        norm_backward.Tile(4096, 8, 396, 2),
        norm_backward.Tile(4096, 8, 264, 3),
        norm_backward.Tile(2048, 8, 528, 3),
        norm_backward.Tile(4096, 8, 396, 3),
    ],
)
WIDE_TRAINING = choices(
    norm_backward,
    "WIDE",
    [
        norm_backward.Tile(0, 16, 132, 4),
        norm_backward.Tile(0, 8, 132, 3),
        norm_backward.Tile(0, 8, 264, 3),
        norm_backward.Tile(0, 16, 132, 3),
    ],
)
GLU_TRAINING = choices(glu_backward, "TILE", [(2048, 4), (2048, 8), (512, 2), (1024, 4)])


def mix(num_sources: int, is_read: bool) -> Callable[..., cases.Case]:
    """The mix or all of depth_read, with its backward."""
    return partial(training.mix_training_case, num_sources=num_sources, is_read=is_read)


TRAINING_ROWS = (
    Row("training short_conv", training.conv_training_case, 1819, 450, CONV_TRAINING),
    Row(
        "training short_conv 8 x 1024",
        partial(training.conv_training_case, lengths=(1024,) * 8),
        None,
        None,
        CONV_TRAINING,
    ),
    Row("training attn_res 9 sources", mix(9, False), 2005, 1100, MIX_TRAINING),
    Row("training depth_read 9 sources", mix(9, True), None, None, MIX_TRAINING),
    Row("training depth_read 2 sources", mix(2, True), None, None, MIX_TRAINING),
    Row(
        "training gated_rms_norm",
        partial(training.norm_training_case, is_gated=True),
        None,
        None,
        NORM_TRAINING,
    ),
    Row(
        "training rms_norm",
        partial(training.norm_training_case, is_gated=False),
        None,
        None,
        WIDE_TRAINING,
    ),
    Row("training mla_prefill T=8192 H=96", training.prefill_training_case, 15300, 16500),
    Row(
        "training mla_prefill 8 x 1024",
        partial(training.prefill_training_case, lengths=(1024,) * 8),
    ),
    Row(
        "training experts 32768 rows",
        training.experts_training_case,
        None,
        13530,
        EXPERTS_TRAINING,
    ),
    Row(
        "training experts 32768 rows, top 16",
        partial(training.experts_training_case, top_k=16),
        None,
        13530,
        EXPERTS_TRAINING,
    ),
    Row(
        "training experts 32768 rows, quantized",
        partial(training.experts_training_case, is_quantized=True),
    ),
    Row("training situ_glu", training.glu_training_case, None, None, GLU_TRAINING),
)
