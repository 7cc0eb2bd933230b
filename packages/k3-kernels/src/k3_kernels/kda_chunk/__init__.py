"""Triton kernels of kda_chunk (report 1.2, 1.4, 1.6)."""
