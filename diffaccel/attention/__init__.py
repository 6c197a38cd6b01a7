"""Attention: which backend computes it (this version), and one seam for masks and kernels (later)."""
