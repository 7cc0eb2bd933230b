"""Optimizers of the trainer: Per-Head Muon and AdamW by parameter role (report 5)."""
