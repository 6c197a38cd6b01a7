"""Sana (and Sprint): linear attention over one stream, deep-compression autoencoder."""

from ..spec import BATCHED, BlockList, ModelSpec

CARD = ModelSpec(
    family="sana",
    denoisers=("transformer",),
    classes=("SanaTransformer2DModel",),
    stack=(BlockList("transformer_blocks", ("hidden_states",), ("hidden_states",), modules=("attn1", "attn2", "ff")),),
    guidance=BATCHED,
    stand_down=("controlnet_block_samples",),
    vae="dc",
    token_layout="rows, columns",
    layout="BCHW",
)
