"""mla_decode: one absorbed query a sequence over a paged latent cache (architecture 3.3, 3.6)."""
