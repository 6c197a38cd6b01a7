"""What can hold the place "vae_tiling"."""

from ..core.place import Lever, Place
from ..core.slots import Slot

PLACE = Place(
    "vae_tiling",
    Slot.MODULE,
    2,
    {"exact": Lever("vae.exact.config", "ExactVae"), "blended": Lever("vae.blended.config", "VaeTiling")},
    prefix="vae_tiling_",
    item_name="vae.tiling",
)
