"""The Gram form of newton_schulz in plain torch, and symmetric products by Triton."""
