"""Reference of depth_read: the references of what it joins."""

from k3_core.ops.attn_res.reference import attn_res
from k3_core.ops.depth_read.compose import read_by
from k3_core.ops.rms_norm.reference import rms_norm

depth_read = read_by(attn_res, rms_norm)
