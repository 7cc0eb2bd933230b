"""Triton kernel of situ_glu."""
