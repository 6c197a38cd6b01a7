"""Blended tiles: diffusers' own tiling with sizes that fit, along time too."""
