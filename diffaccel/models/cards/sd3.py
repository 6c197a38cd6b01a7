"""Stable Diffusion 3 and 3.5. The last block returns no text stream; guidance is batched in one call."""

from .. import probes
from ..spec import BATCHED, BlockList, ModelSpec

CARD = ModelSpec(
    family="sd3",
    denoisers=("transformer",),
    classes=("SD3Transformer2DModel",),
    stack=(
        BlockList(
            "transformer_blocks",
            ("hidden_states", "encoder_hidden_states"),
            ("encoder_hidden_states", "hidden_states"),
            modules=("attn", "attn2", "ff", "ff_context"),
        ),
    ),
    guidance=BATCHED,
    stand_down=("skip_layers", "block_controlnet_hidden_states"),
    token_layout="image, text",
    layout="BCHW",
    modulated=probes.norm1_emb,
)
