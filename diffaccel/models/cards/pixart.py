"""PixArt-alpha and PixArt-sigma: one stream, text by cross attention, guidance in one batch."""

from ..spec import BATCHED, BlockList, ModelSpec

CARD = ModelSpec(
    family="pixart",
    denoisers=("transformer",),
    classes=("PixArtTransformer2DModel",),
    stack=(BlockList("transformer_blocks", ("hidden_states",), ("hidden_states",), modules=("attn1", "attn2", "ff")),),
    guidance=BATCHED,
    token_layout="rows, columns",
    layout="BCHW",
)
