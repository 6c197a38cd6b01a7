"""FLUX.2 and FLUX.2 Klein: double blocks, then single blocks over text and image tokens put together.

Klein's key-value form (`kv_cache_mode`) fills a store inside every block in its first step, so blocks must run.
"""

from .. import probes
from ..spec import EMBEDDED, BlockList, ModelSpec

CARD = ModelSpec(
    family="flux2",
    denoisers=("transformer",),
    classes=("Flux2Transformer2DModel",),
    stack=(
        BlockList(
            "transformer_blocks",
            ("hidden_states", "encoder_hidden_states"),
            ("encoder_hidden_states", "hidden_states"),
            modules=("attn", "ff", "ff_context"),
        ),
        BlockList(
            "single_transformer_blocks",
            ("hidden_states",),
            ("hidden_states",),
            joins=("encoder_hidden_states", "hidden_states"),
            modules=("attn",),
        ),
    ),
    guidance=EMBEDDED,
    stand_down=("kv_cache", "kv_cache_mode"),
    token_layout="text, image",
    grid=probes.grid_of_ids,
)
