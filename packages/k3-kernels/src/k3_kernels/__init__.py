"""K3: Triton kernels behind the op names of k3_core (design 5)."""
