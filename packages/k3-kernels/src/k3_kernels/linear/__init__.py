"""linear: the bias-free products with a weight, for a few rows."""
