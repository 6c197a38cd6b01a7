"""Solvers: how a picture is led through its noise levels, with how many evaluations, and at which levels."""
