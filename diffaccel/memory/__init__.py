"""Memory: VAE tiling (this version), placement and offload (later)."""
