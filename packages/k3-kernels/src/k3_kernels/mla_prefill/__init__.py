"""Triton kernel of mla_prefill."""
