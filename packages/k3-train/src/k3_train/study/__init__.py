"""Studies: the same model trained in several arms that differ in one thing (training 6)."""
