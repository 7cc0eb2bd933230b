"""kda_decode: one launch for a token a row (Triton), or its parts in plain torch."""
