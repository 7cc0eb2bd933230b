"""Triton kernel of gated_rms_norm."""
