"""What can hold the place "offload"."""

from ..core.place import Lever, Place
from ..core.slots import Slot

PLACE = Place(
    "offload",
    Slot.MODULE,
    1,
    {
        "stage": Lever("offload.stage.config", "StageOffload"),
        "layerwise": Lever("offload.layerwise.config", "LayerwiseOffload"),
    },
    prefix="offload_",
)
