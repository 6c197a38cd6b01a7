"""Chroma: FLUX.1 without embedded guidance; its single blocks see text and image tokens put together."""

from .. import probes
from ..spec import TWO_CALLS, BlockList, ModelSpec

CARD = ModelSpec(
    family="chroma",
    denoisers=("transformer",),
    classes=("ChromaTransformer2DModel",),
    stack=(
        BlockList(
            "transformer_blocks",
            ("hidden_states", "encoder_hidden_states"),
            ("encoder_hidden_states", "hidden_states"),
            modules=("attn", "ff", "ff_context"),
        ),
        BlockList(
            "single_transformer_blocks",
            ("hidden_states",),
            ("hidden_states",),
            joins=("encoder_hidden_states", "hidden_states"),
            modules=("proj_out",),
            idle=("attn", "proj_mlp"),
        ),
    ),
    guidance=TWO_CALLS,
    stand_down=("controlnet_block_samples", "controlnet_single_block_samples"),
    token_layout="text, image",
    grid=probes.grid_of_ids,
    modulated=probes.norm1_chroma,
)
