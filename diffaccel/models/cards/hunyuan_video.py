"""HunyuanVideo (text and image to video): single blocks keep both streams apart, like FLUX.1's."""

from .. import probes
from ..spec import EMBEDDED, BlockList, ModelSpec

_STREAMS = ("hidden_states", "encoder_hidden_states")

CARD = ModelSpec(
    family="hunyuan_video",
    denoisers=("transformer",),
    classes=("HunyuanVideoTransformer3DModel",),
    stack=(
        BlockList("transformer_blocks", _STREAMS, _STREAMS, modules=("attn", "ff", "ff_context")),
        BlockList("single_transformer_blocks", _STREAMS, _STREAMS, modules=("proj_out",), idle=("attn", "proj_mlp")),
    ),
    guidance=EMBEDDED,
    vae="kl_causal_3d",
    token_layout="frames, rows, columns, text",
    layout="BCFHW",
    modulated=probes.norm1_emb,
)
