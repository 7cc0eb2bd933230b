"""linear_cross_entropy: the loss of the output head (report 6)."""
