"""The continuous-batching engine (report 5.4; architecture 9)."""
