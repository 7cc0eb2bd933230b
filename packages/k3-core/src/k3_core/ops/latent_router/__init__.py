"""latent_router: what the routed experts and the router read of a token (report 4)."""
