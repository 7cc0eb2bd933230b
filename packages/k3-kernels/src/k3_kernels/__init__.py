"""K3: kernels in Triton and in plain torch behind the op names of k3_core (design 5)."""
