"""What can hold the place "cache": the published step caches, and one put together from parts."""

from ..core.place import Lever, Place
from ..core.slots import Slot
from .dial import ADAPTIVE

PLACE = Place(
    "cache",
    Slot.CALL,
    2,
    {
        "adaptive": Lever("caching.methods.adaptive", "AdaptiveCache", levels=ADAPTIVE),
        "teacache": Lever("caching.methods.teacache", "TeaCache"),
        "first_block": Lever("caching.methods.first_block", "FirstBlockCache"),
        "dbcache": Lever("caching.methods.dbcache", "DBCache"),
        "taylorseer": Lever("caching.methods.taylorseer", "TaylorSeer"),
        "magcache": Lever("caching.methods.magcache", "MagCache"),
        "seacache": Lever("caching.methods.seacache", "SeaCache"),
        "easycache": Lever("caching.methods.easycache", "EasyCache"),
        "dicache": Lever("caching.methods.dicache", "DiCache"),
        "interval": Lever("caching.methods.interval", "IntervalCache"),
        "schedule": Lever("caching.methods.step_schedule", "StepSchedule"),
        "deepcache": Lever("caching.methods.deepcache", "DeepCache"),
        "delta_dit": Lever("caching.methods.delta_dit", "DeltaDiT"),
        "adacache": Lever("caching.methods.adacache", "AdaCache"),
        "custom": Lever("caching.methods.custom", "CustomCache"),
    },
    prefix="cache_",
)
# The verb that puts a method on is `enable_` and this word, or the method's own name.
VERBS = {
    "adaptive": "adaptive_cache",
    "custom": "custom_cache",
    "first_block": "first_block_cache",
    "interval": "interval_cache",
    "schedule": "step_schedule",
}
