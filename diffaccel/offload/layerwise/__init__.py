"""Layerwise offload: few transformer blocks on the device, the rest fetched while it computes."""
