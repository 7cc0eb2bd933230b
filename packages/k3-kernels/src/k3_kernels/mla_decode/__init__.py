"""Triton kernels of mla_decode: split over the context, then reduced."""
