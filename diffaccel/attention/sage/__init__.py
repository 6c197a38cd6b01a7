"""8-bit attention (SageAttention): config, kernels behind one signature, and the reference in plain PyTorch."""
