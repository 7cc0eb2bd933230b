"""Triton kernels of MXFP4 and MXFP8 quantisation."""
