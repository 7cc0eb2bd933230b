"""depth_read: one pass in Triton, or its parts in plain torch."""
