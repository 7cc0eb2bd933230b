"""gated_mla_decode for a few rows on a CPU, of the compiled loops of its parts."""

from k3_core.ops.gated_mla_decode.compose import decode_by
from k3_kernels.linear.loops import linear
from k3_kernels.mla_decode.loops import mla_decode
from k3_kernels.rms_norm.loops import rms_norm

gated_mla_decode = decode_by(rms_norm, linear, mla_decode)
