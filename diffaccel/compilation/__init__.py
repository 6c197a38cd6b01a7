"""Compilation: the blocks of a denoiser, one graph a kind of block (`regional`), and what the machine needs for it."""
