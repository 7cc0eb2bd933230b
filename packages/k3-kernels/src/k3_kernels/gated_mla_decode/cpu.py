"""gated_mla_decode in plain torch, of the forms of its parts."""

from k3_core.custom_op import custom_op
from k3_core.ops.gated_mla_decode.compose import decode_by
from k3_core.ops.linear.reference import linear
from k3_kernels.mla_decode.cpu import mla_decode
from k3_kernels.rms_norm.cpu import rms_norm

gated_mla_decode = custom_op("gated_mla_decode.cpu", is_differentiable=False)(
    decode_by(rms_norm, linear, mla_decode)
)
