"""K3: k3_core."""
