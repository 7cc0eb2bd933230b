"""Triton kernel of route_topk."""
