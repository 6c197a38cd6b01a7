"""Decoding and encoding in parts: exact strips, and tiles that are blended."""
