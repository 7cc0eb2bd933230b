"""An example plugin of K3."""
