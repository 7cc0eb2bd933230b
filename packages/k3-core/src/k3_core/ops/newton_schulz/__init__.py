"""newton_schulz: approximate orthogonalisation of Muon's momentum (report 5)."""
