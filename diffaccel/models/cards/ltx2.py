"""LTX-2: video and audio run through the same blocks and both are read after the last one.

Text guidance is one batch; perturbed-block and isolated-modality guidance are calls of their own, each with a
cache context of its own. What they perturb is the same in every step, so a cache may act in each of them.
"""

from .. import probes
from ..spec import BATCHED, BlockList, ModelSpec

_STREAMS = ("hidden_states", "audio_hidden_states")

CARD = ModelSpec(
    family="ltx2",
    denoisers=("transformer",),
    classes=("LTX2VideoTransformer3DModel",),
    stack=(
        BlockList(
            "transformer_blocks",
            _STREAMS,
            _STREAMS,
            modules=(
                "attn1",
                "attn2",
                "audio_attn1",
                "audio_attn2",
                "audio_to_video_attn",
                "video_to_audio_attn",
                "ff",
                "audio_ff",
            ),
        ),
    ),
    reads=_STREAMS,
    guidance=BATCHED,
    no_resume="sound is stepped by a scheduler of its own, which a snapshot does not see",
    vae="kl_causal_3d",
    token_layout="frames, rows, columns",
    grid=probes.grid_of_numbers,
)
