"""moe_experts: the routed experts of Stable LatentMoE (report 4, architecture 3.5)."""
