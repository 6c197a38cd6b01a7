"""Chroma: FLUX.1 without embedded guidance; its single blocks see text and image tokens put together."""

from .spec import TWO_CALLS, BlockList, ModelSpec

CARD = ModelSpec(
    family="chroma",
    denoisers=("transformer",),
    classes=("ChromaTransformer2DModel",),
    stack=(
        BlockList(
            "transformer_blocks",
            ("hidden_states", "encoder_hidden_states"),
            ("encoder_hidden_states", "hidden_states"),
        ),
        BlockList(
            "single_transformer_blocks",
            ("hidden_states",),
            ("hidden_states",),
            joins=("encoder_hidden_states", "hidden_states"),
        ),
    ),
    guidance=TWO_CALLS,
    stand_down=("controlnet_block_samples", "controlnet_single_block_samples"),
    token_layout="text, image",
)
