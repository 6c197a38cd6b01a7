"""What a memory limit asks of offload: is the one that was wished for needed, does it fit, and which one would?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..core.accelerator import Accelerator, Fidelity, Target
from ..core.compat import unwrap_module
from ..errors import BudgetError, IncompatibleError
from ..ledger.hardware import GIB
from .levers import PLACES
from .options import Budget, build, wished
from .plan import PlanItem

if TYPE_CHECKING:
    from ..core.protocols import Pipeline

HEADROOM = 0.15  # assumed: the share of a GPU that computing takes beside weights, where nobody gave a budget


class Limited(NamedTuple):
    """The wishes, less an offload that is not needed; then the plan item that says so."""

    wishes: dict[str, object]
    item: PlanItem | None


def limit_memory(target: Target, budget: Budget, wishes: dict[str, object], explicit: bool) -> Limited:
    """Offload within the memory budget. A preset's offload (not `explicit`) acts only where weights do not fit.

    Raises:
        BudgetError: the weights do not fit into `memory_gib`, neither as wished; says what would.
    """
    wish = wished(wishes, "offload")
    if budget.memory_gib is None and not wish:
        return Limited(wishes, None)
    place = PLACES["offload"]
    sizes = _sizes(target.pipe)
    target.quantized_bytes = _quantized(target, budget, wishes)
    sizes |= {name: min(sizes[name], size) for name, size in target.quantized_bytes.items() if name in sizes}
    whole = sum(sizes.values()) / GIB
    if wish in place.ready and not explicit:
        why = _not_needed(target, budget, whole)
        if why is not None:
            rest = {k: v for k, v in wishes.items() if k != "offload" and not place.owns(k)}
            return Limited(rest, PlanItem(place.item(wish), place.slot.value, "skipped", why, "exact"))
    if budget.memory_gib is None or whole <= budget.memory_gib:
        return Limited(wishes, None)
    if wish in place.ready:
        wishes = _limited(wishes, wish, budget.memory_gib)
        _require_fit(target, build("offload", wish, wishes), budget.memory_gib, f"{_taken(sizes, budget)}, and ")
        return Limited(wishes, None)
    raise BudgetError(f"{_taken(sizes, budget)}. {_what_fits(target, budget.memory_gib)}")


def _sizes(pipe: Pipeline) -> dict[str, int]:
    return {
        name: sum(_bytes(p) for p in unwrap_module(component).parameters())
        for name, component in pipe.components.items()
        if isinstance(component, torch.nn.Module)
    }


def _bytes(tensor: object) -> int:
    """Bytes of a tensor; of one that wraps others (a quantized weight), theirs."""
    if not isinstance(tensor, torch.Tensor):
        return 0  # a DTensor lists its device mesh among its parts
    inner = getattr(tensor, "__tensor_flatten__", None)
    if inner is None or type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.numel() * tensor.element_size()
    return sum(_bytes(getattr(tensor, name)) for name in inner()[0])


def _quantized(target: Target, budget: Budget, wishes: dict[str, object]) -> dict[str, int]:
    """What the weights of each component will take under the quantization that is wished for, where it can act."""
    wish = wished(wishes, "quantization")
    if not wish or wish not in PLACES["quantization"].ready or budget.min_psnr_db is not None:
        return {}
    lever = build("quantization", wish, wishes)
    say: Callable[[Target], dict[str, int]] | None = getattr(lever, "bytes_after", None)
    allowed = lever.fidelity.rank <= Fidelity(budget.fidelity).rank
    return say(target) if say is not None and allowed and lever.check(target).ok else {}


def _taken(sizes: dict[str, int], budget: Budget) -> str:
    parts = ", ".join(f"{name} {_gib(size / GIB)}" for name, size in sizes.items())
    whole = sum(sizes.values()) / GIB
    return f"memory_gib={budget.memory_gib:g}: the weights alone take {_gib(whole)} GiB ({parts})"


def _gib(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3g}"


def _not_needed(target: Target, budget: Budget, whole: float) -> str | None:
    if budget.memory_gib is not None:
        limit, room = budget.memory_gib, f"a budget of {budget.memory_gib:g} GiB"
    elif target.hardware.memory_gib is not None:
        limit = (1 - HEADROOM) * target.hardware.memory_gib
        room = f"{target.hardware.memory_gib:g} GiB with {HEADROOM:.0%} of it left to compute in"
    else:
        return "no memory limit is known here: give budget=Budget(memory_gib=...), or ask for offload by name"
    return f"not needed: the weights take {_gib(whole)} GiB, which fit into {room}" if whole <= limit else None


def _limited(wishes: dict[str, object], wish: str | bool, memory_gib: float) -> dict[str, object]:
    """Tell a lever that takes a limit in bytes (and was given none) about it."""
    if wish != "stage":
        return wishes
    return {"offload_device_bytes": int(memory_gib * GIB), **wishes}


def _require_fit(target: Target, lever: Accelerator, memory_gib: float, before: str) -> None:
    verdict = lever.check(target)
    if not verdict.ok:
        raise BudgetError(f"{before}{lever.name} cannot act: {verdict.reason}")
    need = _peak(target, lever)
    if need is not None and need > memory_gib:
        raise BudgetError(f"{before}{lever.name} needs {_gib(need)} GiB as wished. {_what_fits(target, memory_gib)}")


def _peak(target: Target, lever: Accelerator) -> float | None:
    """GiB of weights on the device at most under this lever; None where it does not say."""
    say = getattr(lever, "peak_bytes", None)
    return None if say is None else say(target) / GIB


def _what_fits(target: Target, memory_gib: float) -> str:
    """Which offload would keep within the limit."""
    told = []
    for value in PLACES["offload"].ready:
        lever = build("offload", value, _limited({"offload": value}, value, memory_gib))
        try:
            need = _peak(target, lever)
        except (BudgetError, IncompatibleError) as error:
            told.append(f"offload={value!r}: {error}")
            continue
        if need is not None:
            verb = "would fit with" if need <= memory_gib else "would still need"
            told.append(f"offload={value!r} {verb} {_gib(need)} GiB")
    return "; ".join(told) if told else "No offload is ready in this version"
