"""The two attention layers of K3: KDA and Gated MLA (report 1, 2)."""
