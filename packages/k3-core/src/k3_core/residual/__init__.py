"""Depth mixers: how a sublayer reads what the layers before it wrote (report 3)."""
