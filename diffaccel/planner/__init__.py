"""What should be on: wishes (presets, overrides) resolved against model, machine, packages and budget."""
