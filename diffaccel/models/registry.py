"""The cards, sorted, and how a pipeline finds its own."""

from __future__ import annotations

import weakref
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..core.compat import unwrap_module
from ..core.wrappers import class_of, replicated
from .spec import ModelSpec

if TYPE_CHECKING:
    from ..core.protocols import Pipeline

FAMILIES = (
    "chroma",
    "cogvideox",
    "flux",
    "flux2",
    "hunyuan_video",
    "hunyuan_video15",
    "ltx",
    "ltx2",
    "mochi",
    "pixart",
    "qwen",
    "sana",
    "sd3",
    "sdxl",
    "wan",
    "z_image",
)

CARDS: dict[str, ModelSpec] = {name: import_module(f".cards.{name}", __package__).CARD for name in FAMILIES}

UNKNOWN = "unknown"  # family of a model without a card whose blocks are not known (yet)

# What was learnt of a denoiser without a card, for as long as it lives: a ModelSpec, or an `infer.Refusal`.
_LEARNED: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def learned(module: Any) -> Any:
    """What a run showed of this denoiser's blocks: a ModelSpec, a refusal, or None where none was recorded."""
    return _LEARNED.get(unwrap_module(module))


def remember(module: Any, found: Any) -> None:
    """Keep what was learnt of a denoiser."""
    _LEARNED[module] = found


# Components that may be a denoiser, the main one first. Several of one class run beside each other in every step
# (Ideogram 4's `unconditional_transformer`), one after the other (experts), or one of them in a whole run
# (MiniMax-H3's `transformer_ref`).
DENOISERS = (
    "transformer",
    "unet",
    "prior",
    "decoder",
    "transformer_ref",
    "unconditional_transformer",
    "transformer_2",
)


def lookup(pipe: Pipeline) -> ModelSpec:
    """The card of a pipeline, by the class name of its denoiser.

    A model without a card gets what was learnt of it in an earlier run, else one that knows only where the denoiser
    is (family UNKNOWN): runs are timed and reported, and a lever that needs to know more says what is missing.
    """
    found: list[str] = []
    for component in DENOISERS:
        module = getattr(pipe, component, None)
        if module is None:
            continue
        name = class_of(module).__name__
        config = getattr(unwrap_module(module), "config", None)
        for card in CARDS.values():
            known = component in card.denoisers and name in card.classes
            if known and all(getattr(config, key, None) == value for key, value in card.config):
                copies = replicated(module)
                return replace(card, stack=(), unet=None, no_stack=f"{component}: {copies}") if copies else card
        found.append(component)
    if not found:
        return ModelSpec(UNKNOWN, (), (), no_stack=_why_none(pipe))
    module = getattr(pipe, found[0])
    name, known = class_of(module).__name__, learned(module)
    denoisers = tuple(part for part in found if class_of(getattr(pipe, part)) is class_of(module))
    if isinstance(known, ModelSpec):
        return replace(known, denoisers=denoisers)
    if known is None:
        why = "its blocks are learnt in the next run, and the plan is made anew after that"
    else:
        why = f"its blocks could not be learnt: {known}"
    return ModelSpec(
        family=UNKNOWN,
        denoisers=denoisers,
        classes=(),
        no_stack=f"diffaccel has no card for {name} (families: {', '.join(CARDS)}); {why}",
    )


def _why_none(pipe: Pipeline) -> str:
    """Why there is no denoiser: a modular pipeline may load its components later."""
    parts = getattr(pipe, "components", {})
    missing = [name for name in DENOISERS if name in parts]
    if missing:
        return f"its {missing[0]} is not loaded yet; once it is, the plan is made anew before the next run"
    return f"it has none of {', '.join(DENOISERS)}"
