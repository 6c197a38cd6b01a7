"""What a memory limit asks of offload: is the one that was wished for needed, does it fit, and which one would?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..core.accelerator import Accelerator, Fidelity, Target
from ..errors import BudgetError, IncompatibleError
from ..ledger.hardware import GIB
from .levers import PLACES
from .options import Budget, build, wished
from .plan import PlanItem
from .sizes import Needs, component_bytes

HEADROOM = 0.15  # assumed: the share of a GPU that computing takes beside weights, where the ledger knows no better
SPARE = 0.05  # assumed: the share of a GPU that the allocator cannot use


class Limited(NamedTuple):
    """The wishes as memory has them; the plan item of an offload that is not needed; notes about what was changed."""

    wishes: dict[str, object]
    item: PlanItem | None = None
    notes: tuple[str, ...] = ()


def limit_memory(target: Target, budget: Budget, wishes: dict[str, object], explicit: bool) -> Limited:
    """Offload within the memory of the budget or the machine; what is exact goes before what is not.

    A preset's offload (not `explicit`) acts only where it is needed; where taking turns by stage is not enough, layers
    take turns, and where a decode alone does not fit, it is made in strips.

    Raises:
        BudgetError: the weights do not fit into `memory_gib`, neither as wished; says what would.
    """
    wish = wished(wishes, "offload")
    if budget.memory_gib is None and not wish:
        return Limited(wishes)
    place = PLACES["offload"]
    sizes = component_bytes(target.pipe)
    target.quantized_bytes = _quantized(target, budget, wishes)
    sizes |= {name: min(sizes[name], size) for name, size in target.quantized_bytes.items() if name in sizes}
    whole = sum(sizes.values()) / GIB
    notes: tuple[str, ...] = ()
    if wish in place.ready and not explicit:
        need = _needs(target, budget, wishes, sizes)
        why = _not_needed(target, budget, whole, need)
        if why is not None:
            return Limited(_without(wishes), PlanItem(place.item(wish), place.slot.value, "skipped", why, "exact"))
        if need is not None:
            wishes, strips = _in_strips(target, budget, wishes, need)
            need = _needs(target, budget, wishes, sizes) if strips else need
            wishes, layers = (wishes, ()) if need is None else _by_layer(target, wishes, need)
            notes = (*strips, *layers)
        wish = wished(wishes, "offload")
    if budget.memory_gib is None or whole <= budget.memory_gib:
        return Limited(wishes, notes=notes)
    if wish in place.ready:
        wishes = _limited(wishes, wish, budget.memory_gib)
        _require_fit(target, build("offload", wish, wishes), budget.memory_gib, f"{_taken(sizes, budget)}, and ")
        return Limited(wishes, notes=notes)
    raise BudgetError(f"{_taken(sizes, budget)}. {_what_fits(target, budget.memory_gib)}")


def _without(wishes: dict[str, object]) -> dict[str, object]:
    """No offload, nor its parameters."""
    return {key: value for key, value in wishes.items() if key != "offload" and not PLACES["offload"].owns(key)}


def _needs(target: Target, budget: Budget, wishes: dict[str, object], sizes: Mapping[str, int]) -> Needs | None:
    """What the machine must hold by where weights lie; None where a budget is given, or nothing is known."""
    if budget.memory_gib is not None or target.hardware.memory_gib is None or not target.hardware.may.own_memory:
        return None
    from .costs import needs_of  # brings the ledger's closed forms along

    return needs_of(target, sizes, _live(target), bool(wished(wishes, "vae_tiling")))


def _live(target: Target) -> int | None:
    """Bytes of blocks on the device at once under layerwise offload; None where it cannot act."""
    lever = build("offload", "layerwise", {"offload": "layerwise"})
    if not lever.check(target).ok:
        return None
    live = lever.predict(target)["resident_bytes"]
    before = component_bytes(target.pipe)
    shrunk = sum(target.quantized_bytes.get(name, before[name]) for name in target.spec.denoisers if name in before)
    return round(int(str(live)) * shrunk / max(1, sum(before.get(name, 0) for name in target.spec.denoisers)))


def _room(target: Target) -> tuple[float, str]:
    """GiB that may be used of the machine's memory, and that in words."""
    memory = target.hardware.memory_gib or 0.0
    return (1 - SPARE) * memory, f"{memory:g} GiB less {SPARE:.0%}"


def _in_strips(
    target: Target, budget: Budget, wishes: dict[str, object], need: Needs
) -> tuple[dict[str, object], tuple[str, ...]]:
    """The wishes with strips, where a decode alone does not fit and nobody wished for anything there; a note."""
    limit, room = _room(target)
    if need.decoding <= limit or "vae_tiling" in wishes or budget.fidelity == Fidelity.EXACT.value:
        return wishes, ()
    if not build("vae_tiling", "exact", {"vae_tiling": "exact"}).check(target).ok:
        return wishes, ()
    note = f"vae_tiling='exact': a whole decode needs {need.decoding:.1f} GiB of {room}"
    return {**wishes, "vae_tiling": "exact"}, (note,)


def _by_layer(target: Target, wishes: dict[str, object], need: Needs) -> tuple[dict[str, object], tuple[str, ...]]:
    """The wishes with layers in place of stages, where only those fit; a note."""
    limit, room = _room(target)
    fits = need.by_layer is not None and need.by_layer <= limit
    if wished(wishes, "offload") != "stage" or need.by_stage <= limit or not fits:
        return wishes, ()
    note = (
        f"offload='layerwise', not 'stage': stages need {need.by_stage:.1f} GiB of {room}, layers {need.by_layer:.1f}"
    )
    return {**_without(wishes), "offload": "layerwise"}, (note,)


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


def _not_needed(target: Target, budget: Budget, whole: float, need: Needs | None) -> str | None:
    memory = target.hardware.memory_gib
    if need is not None and memory is not None:
        if need.resident > (1 - SPARE) * memory:
            return None
        return f"not needed: {_gib(need.resident)} GiB with all weights resident, which fit into {memory:g} GiB"
    if budget.memory_gib is not None:
        limit, room = budget.memory_gib, f"a budget of {budget.memory_gib:g} GiB"
    elif memory is not None:
        limit = (1 - HEADROOM) * memory
        room = f"{memory:g} GiB with {HEADROOM:.0%} of it left to compute in"
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
