"""Qwen-Image and its edit, inpaint and layered forms (reference pictures are more image tokens)."""

from .. import probes
from ..spec import TWO_CALLS, BlockList, ModelSpec

CARD = ModelSpec(
    family="qwen",
    denoisers=("transformer",),
    classes=("QwenImageTransformer2DModel",),
    stack=(
        BlockList(
            "transformer_blocks",
            ("hidden_states", "encoder_hidden_states"),
            ("encoder_hidden_states", "hidden_states"),
            modules=("attn", "img_mlp", "txt_mlp"),
        ),
    ),
    guidance=TWO_CALLS,
    stand_down=("controlnet_block_samples",),
    vae="kl_causal_3d",
    token_layout="text, image",
    grid=probes.grid_of_shapes,
)
