"""LoRA: one manager per pipeline, the files, and the branch or merge in a layer."""
