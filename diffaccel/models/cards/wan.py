"""Wan 2.1 and 2.2 (one or two experts: `transformer`, `transformer_2`), VACE among them (`models/controls.py`)."""

from .. import probes
from ..spec import TWO_CALLS, BlockList, ModelSpec

CARD = ModelSpec(
    family="wan",
    denoisers=("transformer", "transformer_2"),
    boundary="boundary_ratio",
    classes=("WanTransformer3DModel", "WanVACETransformer3DModel"),
    stack=(
        BlockList(
            "blocks", ("hidden_states", "encoder_hidden_states"), ("hidden_states",), modules=("attn1", "attn2", "ffn")
        ),
    ),
    guidance=TWO_CALLS,
    vae="kl_causal_3d",
    token_layout="frames, rows, columns",
    frame_sink=True,
    layout="BCFHW",
    time_embedding=probes.time_wan,
)
