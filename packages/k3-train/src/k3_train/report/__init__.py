"""What a run shows of itself: diagnostics while it trains, and one page about it (repository 6)."""
