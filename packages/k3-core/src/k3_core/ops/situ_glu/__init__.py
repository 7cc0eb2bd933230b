"""situ_glu: the capped gated activation of every feed-forward (report 4.1, architecture 3.1)."""
