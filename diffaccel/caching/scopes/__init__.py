"""Scopes: which part of the denoiser a reused step leaves out, and what skips it."""
