"""Triton kernels of Attention Residuals: the whole mix, and its two phases (report 3.2)."""
