"""Counting real modules, on meta or with weights: what they multiply, and what they hold meanwhile. Needs torch."""
