"""What can hold the place "attention"."""

from ..core.place import Lever, Place
from ..core.slots import Slot

KERNELS = ("auto", "native", "flash", "flash3", "cudnn", "xformers", "flex")
METHODS = ("radial", "sta", "svg", "svg2", "topk")  # of sparse attention

PLACE = Place(
    "attention",
    Slot.CALL,
    0,
    {
        **{name: Lever("attention.choice", "AttentionBackend", {"backend": name}) for name in KERNELS},
        "sage": Lever("attention.sage.config", "SageAttention"),
        **{name: Lever("attention.sparse.config", "SparseAttention", {"method": name}) for name in METHODS},
        "sparse_auto": Lever("attention.sparse.config", "SparseAttention", {"method": "auto"}),
        "custom": Lever("attention.sparse.config", "SparseAttention"),
    },
    prefix="attention_",
)
