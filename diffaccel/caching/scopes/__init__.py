"""Scopes: which part of the denoiser a reused step leaves out, and the hooks that skip it; a file each."""
