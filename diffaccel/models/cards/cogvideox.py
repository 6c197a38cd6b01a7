"""CogVideoX (text, image and video to video)."""

from .. import probes
from ..spec import BATCHED, BlockList, ModelSpec

_STREAMS = ("hidden_states", "encoder_hidden_states")

CARD = ModelSpec(
    family="cogvideox",
    denoisers=("transformer",),
    classes=("CogVideoXTransformer3DModel",),
    stack=(BlockList("transformer_blocks", _STREAMS, _STREAMS, modules=("attn1", "ff")),),
    guidance=BATCHED,
    batchless=("image_rotary_emb",),
    vae="kl_causal_3d",
    token_layout="text, frames, rows, columns",
    layout="BFCHW",
    time_embedding=probes.time_cogvideox,
)
