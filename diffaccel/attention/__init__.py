"""Attention: who computes it (backends), in how many bits (sage/), over which blocks (sparse/, kernels/).

`intercept` is the one place where the calls of a pipeline's processors are answered by one of these levers.
"""
