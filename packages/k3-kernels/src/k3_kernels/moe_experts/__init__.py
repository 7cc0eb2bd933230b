"""Triton kernels of the routed experts: a plan of rows, two grouped products, a sum."""
