"""Triton kernels of kda_segment (report 1.6, 1.7)."""
