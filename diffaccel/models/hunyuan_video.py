"""HunyuanVideo (text and image to video): single blocks keep both streams apart, like FLUX.1's."""

from .spec import EMBEDDED, BlockList, ModelSpec

_STREAMS = ("hidden_states", "encoder_hidden_states")

CARD = ModelSpec(
    family="hunyuan_video",
    denoisers=("transformer",),
    classes=("HunyuanVideoTransformer3DModel",),
    stack=(
        BlockList("transformer_blocks", _STREAMS, _STREAMS),
        BlockList("single_transformer_blocks", _STREAMS, _STREAMS),
    ),
    guidance=EMBEDDED,
    vae="kl_causal_3d",
    token_layout="frames, rows, columns, text",
)
