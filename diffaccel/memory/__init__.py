"""Memory: stages and blocks that take turns on the device, and VAE tiling."""
