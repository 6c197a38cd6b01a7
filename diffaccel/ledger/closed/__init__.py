"""Architectures written out as arithmetic: what a forward multiplies, from a config alone. Pure Python."""
