"""Reference of gated_mla_decode: the references of what it joins."""

from k3_core.custom_op import custom_op
from k3_core.ops.gated_mla_decode.compose import decode_by
from k3_core.ops.linear.reference import linear
from k3_core.ops.mla_decode.reference import mla_decode
from k3_core.ops.rms_norm.reference import rms_norm

gated_mla_decode = custom_op("gated_mla_decode.reference", is_differentiable=False)(
    decode_by(rms_norm, linear, mla_decode)
)
