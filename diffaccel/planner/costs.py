"""The ledger of the pipeline that is planned for, and what it needs on the device; arithmetic on configs and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core.compat import unwrap_module
from ..errors import DiffaccelError, UnsupportedModelError
from ..ledger.arithmetic import estimate
from ..ledger.book import GIB, Ledger
from ..ledger.exchange.account import LAYERS, RESIDENT, STAGES, opened
from ..ledger.live.counting import describe
from ..ledger.memory import CONTEXT_GIB
from ..ledger.models import Model
from .sizes import Needs, component_bytes

if TYPE_CHECKING:
    from ..core.accelerator import Target

EXPERTS = ("transformer", "transformer_2")  # of a ledger, by their place among the denoisers
TILED = 0.5  # assumed: what of a decode's peak is left in strips


def book_of(target: Target, model: Model | None = None, asked: Mapping[str, int] | None = None) -> Ledger:
    """The book of the pipeline, with its weights as they lie there; `model`: what it was made of, if from configs.

    Raises DiffaccelError for a pipeline that the ledger has no closed form for.
    """
    if not target.spec.denoisers:
        raise UnsupportedModelError("no denoiser is known")
    pipe, first = target.pipe, target.spec.denoisers[0]
    found = model or describe(pipe, first, unwrap_module(getattr(pipe, first)))
    height, width, frames, steps = ((asked or {}).get(name) for name in ("height", "width", "frames", "steps"))
    ledger = estimate(found, height, width, frames, steps, hardware=target.hardware)
    return replace(ledger, weights_bytes=by_part(target, component_bytes(pipe)))


def by_part(target: Target, sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of components under the ledger's names; what is neither denoiser nor VAE counts as text encoders."""
    rest = dict(sizes)
    there = [part for part in target.spec.denoisers if part in rest]
    found = {name: rest.pop(part) for name, part in zip(EXPERTS, there, strict=False)}
    return found | {"vae": rest.pop("vae", 0), "text_encoders": sum(rest.values())}


def needs_of(target: Target, sizes: Mapping[str, int], live: int | None, tiled: bool) -> Needs | None:
    """What the device must hold with weights of these sizes; `live` bytes of blocks are there at once by layer.

    Weights, working memory of the model's usual size, and a context; None where the ledger has no closed form.
    """
    try:
        account = opened(book_of(target))
    except DiffaccelError:
        return None
    weights = {name: size / GIB for name, size in by_part(target, sizes).items()}
    decoding = account.decoding_gib * (TILED if tiled else 1)
    account = replace(account, weights_gib=weights, decoding_gib=decoding, live_gib=(live or 0) / GIB)
    resident, stages, layers = (replace(account, place=place).need_gib for place in (RESIDENT, STAGES, LAYERS))
    return Needs(resident, stages, None if live is None else layers, weights.get("vae", 0.0) + decoding + CONTEXT_GIB)
