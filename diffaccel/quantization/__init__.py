"""Fewer bits for weights (and activations): one policy of what stays in high precision, one lever per scheme."""
