"""The training loop: steps, checkpoints, signals, log rows and time limits."""
