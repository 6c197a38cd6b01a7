"""Guidance: what can be saved of the second branch that classifier-free guidance runs in every step."""
