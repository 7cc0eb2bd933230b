"""Triton kernels of kda_replay (report 1.8)."""
