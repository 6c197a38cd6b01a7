"""FLUX.1 (dev, schnell, and every pipeline around FluxTransformer2DModel)."""

from .. import probes
from ..spec import EMBEDDED, BlockList, ModelSpec

_STREAMS = ("hidden_states", "encoder_hidden_states")
_RETURNS = ("encoder_hidden_states", "hidden_states")

CARD = ModelSpec(
    family="flux",
    denoisers=("transformer",),
    classes=("FluxTransformer2DModel",),
    stack=(
        BlockList("transformer_blocks", _STREAMS, _RETURNS, modules=("attn", "ff", "ff_context")),
        BlockList("single_transformer_blocks", _STREAMS, _RETURNS, modules=("proj_out",), idle=("attn", "proj_mlp")),
    ),
    guidance=EMBEDDED,
    stand_down=("controlnet_block_samples", "controlnet_single_block_samples"),
    token_layout="text, image",
    grid=probes.grid_of_ids,
    modulated=probes.norm1_emb,
)
