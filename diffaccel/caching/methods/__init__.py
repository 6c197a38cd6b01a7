"""The published step caches, each one composition of gate, predictor, guards and scope."""

from __future__ import annotations

from .adacache import AdaCache
from .base import StepCache
from .custom import CustomCache
from .dbcache import DBCache
from .deepcache import DeepCache
from .delta_dit import DeltaDiT
from .dicache import DiCache
from .easycache import EasyCache
from .first_block import FirstBlockCache
from .interval import IntervalCache
from .magcache import MagCache
from .seacache import SeaCache
from .step_schedule import StepSchedule
from .taylorseer import TaylorSeer
from .teacache import TeaCache

METHODS: dict[str, type[StepCache]] = {
    "adacache": AdaCache,
    "custom": CustomCache,
    "dbcache": DBCache,
    "deepcache": DeepCache,
    "delta_dit": DeltaDiT,
    "dicache": DiCache,
    "easycache": EasyCache,
    "first_block": FirstBlockCache,
    "interval": IntervalCache,
    "magcache": MagCache,
    "schedule": StepSchedule,
    "seacache": SeaCache,
    "taylorseer": TaylorSeer,
    "teacache": TeaCache,
}

__all__ = ["METHODS", "StepCache"]
