"""`k3 kernels bench`: every implementation of an op timed against its reference in one run."""
