"""Mochi: the last block does not update the text stream; time runs from 0 to 1000."""

from .. import probes
from ..spec import BATCHED, BlockList, ModelSpec

_STREAMS = ("hidden_states", "encoder_hidden_states")

CARD = ModelSpec(
    family="mochi",
    denoisers=("transformer",),
    classes=("MochiTransformer3DModel",),
    stack=(BlockList("transformer_blocks", _STREAMS, _STREAMS, modules=("attn1", "ff", "ff_context")),),
    guidance=BATCHED,
    vae="kl_causal_3d",
    token_layout="frames, rows, columns, text",
    layout="BCFHW",
    modulated=probes.norm1_mochi,
)
