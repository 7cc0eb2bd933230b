"""K3: k3_serve."""
