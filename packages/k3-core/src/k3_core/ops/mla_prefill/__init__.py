"""mla_prefill: causal softmax attention of Gated MLA over expanded heads (architecture 3.3)."""
