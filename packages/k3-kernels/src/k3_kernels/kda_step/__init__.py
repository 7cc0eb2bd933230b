"""Triton kernels of kda_step and of the fully fused decode (report 1.8)."""
