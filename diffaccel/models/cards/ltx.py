"""LTX-Video 0.9: one stream through the blocks, text by cross attention, guidance in one batch."""

from .. import probes
from ..spec import BATCHED, BlockList, ModelSpec

CARD = ModelSpec(
    family="ltx",
    denoisers=("transformer",),
    classes=("LTXVideoTransformer3DModel",),
    stack=(
        BlockList(
            "transformer_blocks",
            ("hidden_states", "encoder_hidden_states"),
            ("hidden_states",),
            modules=("attn1", "attn2", "ff"),
        ),
    ),
    guidance=BATCHED,
    vae="kl_causal_3d",
    token_layout="frames, rows, columns",
    grid=probes.grid_of_numbers,
    modulated=probes.norm1_table,
)
