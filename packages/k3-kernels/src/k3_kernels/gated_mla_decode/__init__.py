"""Decode rows of a Gated MLA layer between its projections, in three launches."""
