"""Compilation: the blocks of a denoiser one by one (this version), fused kernels (later)."""
