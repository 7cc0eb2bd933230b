"""Feed-forwards: the dense MLP and Stable LatentMoE (report 4)."""
