"""Triton kernels of short_conv: packed sequences, and decode with states in place."""
