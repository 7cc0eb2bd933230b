"""kda_decode in plain torch, of the forms of its parts."""

from k3_core.custom_op import custom_op
from k3_core.ops.gated_rms_norm.reference import gated_rms_norm
from k3_core.ops.kda_decode.compose import decode_by
from k3_kernels.kda_step.cpu import kda_step
from k3_kernels.short_conv.cpu import short_conv

kda_decode = custom_op("kda_decode.cpu", is_differentiable=False)(
    decode_by(short_conv, kda_step, gated_rms_norm)
)
