"""depth_read in plain torch, of the forms of its parts."""

from k3_core.ops.depth_read.compose import read_by
from k3_kernels.attn_res.cpu import attn_res
from k3_kernels.rms_norm.cpu import rms_norm

depth_read = read_by(attn_res, rms_norm)
