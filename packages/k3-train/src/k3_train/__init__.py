"""K3: k3_train."""
