"""Latent down-projection and router in one product, and in two of torch."""
