"""The loss of the output head, chunk by chunk, in plain torch and by Triton."""
