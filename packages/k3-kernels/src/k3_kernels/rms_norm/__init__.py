"""Triton kernel of rms_norm."""
