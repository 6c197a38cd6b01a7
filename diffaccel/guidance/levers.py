"""What can hold the place "guidance"."""

from ..core.place import Lever, Place
from ..core.slots import Slot

PLACE = Place("guidance", Slot.CALL, 1, {"reuse": Lever("guidance.reuse", "GuidanceReuse")}, prefix="guidance_")
