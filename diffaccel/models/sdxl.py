"""Stable Diffusion XL: a U-Net, so there is no stack of transformer blocks."""

from .spec import BATCHED, ModelSpec

CARD = ModelSpec(
    family="sdxl",
    denoisers=("unet",),
    classes=("UNet2DConditionModel",),
    config=(("addition_embed_type", "text_time"),),
    guidance=BATCHED,
    batchless=("ip_adapter_masks",),
    no_stack="its denoiser is a U-Net without a stack of transformer blocks",
    input="sample",
    layout="BCHW",
)
