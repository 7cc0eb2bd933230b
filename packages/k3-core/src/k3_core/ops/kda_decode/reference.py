"""Reference of kda_decode: the references of what it joins."""

from k3_core.custom_op import custom_op
from k3_core.ops.gated_rms_norm.reference import gated_rms_norm
from k3_core.ops.kda_decode.compose import decode_by
from k3_core.ops.kda_step.reference import kda_step
from k3_core.ops.short_conv.reference import short_conv

kda_decode = custom_op("kda_decode.reference", is_differentiable=False)(
    decode_by(short_conv, kda_step, gated_rms_norm)
)
