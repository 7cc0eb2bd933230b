"""attn_res: attention over depth, the mix of Attention Residuals (report 3, architecture 3.4)."""
