"""What is kept of activations between forward and backward, annotated from outside (report 7.2)."""
