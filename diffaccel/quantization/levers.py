"""What can hold the places "quantization" and "lora"."""

from ..core.place import Lever, Place
from ..core.slots import Slot

PLACE = Place(
    "quantization",
    Slot.WEIGHT,
    1,
    {
        "fp8": Lever("quantization.fp8_int8", "Fp8"),
        "int8": Lever("quantization.fp8_int8", "Int8"),
        "svdquant": Lever("quantization.svdquant.config", "SvdQuant"),
    },
    prefix="quantization_",
)
LORA = Place("lora", Slot.WEIGHT, 2, {"True": Lever("quantization.lora.lever", "Lora")}, prefix="lora_", switch=True)
