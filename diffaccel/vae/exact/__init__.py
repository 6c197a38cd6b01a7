"""Exact strips: the picture of a plain decode or encode at a fraction of its peak memory."""
