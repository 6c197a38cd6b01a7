"""Z-Image: refiners of image and text, then `layers` over both put together; time runs from 0 to 1.

The denoiser takes lists (one tensor for each picture) as positional arguments, and its pipelines put the
conditional half of a guided batch first.
"""

from ..spec import BATCHED, BlockList, ModelSpec

CARD = ModelSpec(
    family="z_image",
    denoisers=("transformer",),
    classes=("ZImageTransformer2DModel",),
    stack=(BlockList("layers", ("x",), ("x",), modules=("attention", "feed_forward")),),
    stream="x",
    guidance=BATCHED,
    conditional_first=True,
    stand_down=("controlnet_block_samples",),
    token_layout="image, text",
    input="x",
    layout="list",
)
