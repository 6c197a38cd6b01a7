"""Weights that are elsewhere until they are needed: stage by stage, or block by block."""
