"""rms_norm: the norm before every sublayer and inside low-rank projections (architecture 3)."""
