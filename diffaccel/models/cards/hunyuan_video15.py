"""HunyuanVideo 1.5: double blocks only; guidance through a guider, one call for each of its conditions."""

from .. import probes
from ..spec import TWO_CALLS, BlockList, ModelSpec

_STREAMS = ("hidden_states", "encoder_hidden_states")

CARD = ModelSpec(
    family="hunyuan_video15",
    denoisers=("transformer",),
    classes=("HunyuanVideo15Transformer3DModel",),
    stack=(BlockList("transformer_blocks", _STREAMS, _STREAMS, modules=("attn", "ff", "ff_context")),),
    guidance=TWO_CALLS,
    vae="kl_causal_3d",
    token_layout="frames, rows, columns, text",
    layout="BCFHW",
    modulated=probes.norm1_emb,
)
