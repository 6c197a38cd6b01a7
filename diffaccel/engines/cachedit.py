"""Step caches of a plan as settings of Cache-DiT, which SGLang and vLLM-Omni both carry."""

from __future__ import annotations

from dataclasses import dataclass

from ..planner.plan import PlanItem
from .request import NEAR, SAME, Row, number

UNLIMITED = -1


@dataclass(frozen=True)
class CacheDit:
    """Blocks that are always computed in front and behind, steps before the first reuse, the threshold on the relative
    change of the residual, steps reused in a row, and the order of the forecast (0: none)."""

    front: int
    back: int
    warmup: int
    threshold: float
    row: int
    order: int


def settings(item: PlanItem) -> tuple[CacheDit, Row] | None:
    """(settings, what is said of them) of `cache.first_block`, `cache.dbcache` and `cache.taylorseer`, else None."""
    row = int(number(item, "max_consecutive", UNLIMITED))
    order = int(number(item, "order", 0))
    warmup = int(number(item, "warmup_steps", 0))
    threshold = number(item, "threshold", 0.08)
    if item.name == "cache.first_block":
        said = Row(item.name, NEAR, "DBCache with one block in front: the same comparison; guards differ")
        return CacheDit(1, 0, warmup, threshold, row, order), said
    if item.name == "cache.dbcache":
        front, back = int(number(item, "front_blocks", 8)), int(number(item, "back_blocks", 0))
        return CacheDit(front, back, warmup, threshold, row, order), Row(item.name, SAME, _mask(item))
    if item.name == "cache.taylorseer":
        interval = int(number(item, "interval", 4))
        why = f"forecasts behind a threshold instead of every {interval} steps; no correction"
        return CacheDit(1, 0, int(number(item, "first_enhance", 3)), 0.24, interval - 1, max(order, 1)), Row(
            item.name, NEAR, why
        )
    return None


def _mask(item: PlanItem) -> str:
    return "without its steps_mask" if item.params.get("steps_mask") else ""
