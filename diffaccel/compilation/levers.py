"""What can hold the places "fusion" and "compile"."""

from ..core.place import Lever, Place
from ..core.slots import Slot

FUSION = Place("fusion", Slot.WEIGHT, 0, {}, switch=True)  # named by the contract, not built yet
PLACE = Place(
    "compile",
    Slot.MODULE,
    0,
    {"True": Lever("compilation.regional", "RegionalCompile")},
    prefix="compile_",
    switch=True,
)
