"""Stable Diffusion XL: a U-Net, so there is no stack of transformer blocks."""

from ..spec import BATCHED, ModelSpec, UNet

# Shared by the whole line of U-Nets since Stable Diffusion 1.
PARTS = UNet(
    down="down_blocks",
    middle="mid_block",
    up="up_blocks",
    layers=("resnets", "attentions"),
    tuples=("attentions",),
    samplers="downsamplers",
    blocks=(
        "CrossAttnDownBlock2D",
        "CrossAttnUpBlock2D",
        "DownBlock2D",
        "UNetMidBlock2D",
        "UNetMidBlock2DCrossAttn",
        "UpBlock2D",
    ),
)

CARD = ModelSpec(
    family="sdxl",
    denoisers=("unet",),
    classes=("UNet2DConditionModel",),
    config=(("addition_embed_type", "text_time"),),
    guidance=BATCHED,
    stand_down=(  # ControlNet and T2I-Adapter
        "down_block_additional_residuals",
        "mid_block_additional_residual",
        "down_intrablock_additional_residuals",
    ),
    batchless=("ip_adapter_masks",),
    no_stack="its denoiser is a U-Net without a stack of transformer blocks",
    unet=PARTS,
    input="sample",
    layout="BCHW",
)
