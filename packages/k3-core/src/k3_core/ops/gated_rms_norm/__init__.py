"""gated_rms_norm: the output norm and gate of KDA (architecture 3.2 step 6, report 1.1)."""
