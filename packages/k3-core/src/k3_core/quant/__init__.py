"""Quantised weights: MXFP4 as the released checkpoint stores it (architecture 2.2)."""

from .fake import fake_mxfp4, fake_mxfp8
from .mx import BLOCK, E2M1_VALUES, MXTensor, bad_scale

__all__ = ["BLOCK", "E2M1_VALUES", "MXTensor", "bad_scale", "fake_mxfp4", "fake_mxfp8"]
