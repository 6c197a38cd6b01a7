"""Stage offload: encoders, denoiser and decoder take turns on the device."""
