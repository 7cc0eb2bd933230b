"""linear: the bias-free products with a weight, of every projection (architecture 2.1)."""
