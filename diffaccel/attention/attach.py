"""What every attention lever does alike: ask whether attention can be intercepted, and hand its calls to a handler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.accelerator import Edit, Site, Target, Verdict
from ..core.run import Run
from ..core.wrappers import replicated
from ..errors import UnsupportedModelError
from .calls import Handler
from .intercept import Interception
from .processors import form, processors


def interceptable(target: Target) -> Verdict:
    """Yes, where some attention of the denoisers can be intercepted; else no, with the reason."""
    modules = [getattr(target.pipe, name, None) for name in target.spec.denoisers]
    copies = next((why for module in modules if module is not None and (why := replicated(module))), "")
    if copies:
        return Verdict.no(f"{target.spec.family}: {copies}", UnsupportedModelError)
    found = [row for module in modules if module is not None for row in processors(module)]
    if not found:
        return Verdict.no(
            f"{target.spec.family}: no attention processor was found in its denoisers", UnsupportedModelError
        )
    if not any(form(processor) for _, _, processor in found):
        kinds = ", ".join(sorted({type(processor).__name__ for _, _, processor in found}))
        return Verdict.no(
            f"{target.spec.family}: its attention processors ({kinds}) call neither diffusers' dispatcher nor "
            "scaled_dot_product_attention",
            UnsupportedModelError,
        )
    return Verdict.yes()


def attach_handler(
    name: str,
    target: Target,
    site: Site,
    handler: Handler,
    begin_run: Callable[[Run], None],
    stats: Callable[[Run], dict[str, Any]],
    inline: Any = None,
) -> Edit:
    """Intercept the attention of every denoiser with `handler`; the edit takes that back.

    `inline` is a diffusers backend that compiled graphs may call themselves.
    """
    opened: list[Interception] = []

    def undo() -> None:
        for interception in reversed(opened):
            interception.close()
        opened.clear()

    def relink() -> None:
        for interception in opened:
            interception.route()  # processors that were set since

    try:
        for component, root in site.roots.items():
            interception = Interception(getattr(target.pipe, component), target.spec, handler)
            interception.inline = inline
            opened.append(interception)
            interception.open(root, site.rank)
    except BaseException:
        undo()
        raise

    def displaced() -> str:
        return in_words(opened)

    return Edit(name, undo, begin_run=begin_run, relink=relink, stats=stats, displaced=displaced)


def in_words(interceptions: Sequence[Interception]) -> str:
    """What has taken the place of a lever since it was attached, in a clause; "" where nothing has."""
    layers = sum(len(interception.sites) for interception in interceptions)
    kinds, backends = [], []
    for interception in interceptions:
        found = interception.displaced()
        kinds += found[0]
        backends += found[1]
    said = []
    if kinds:
        named = ", ".join(sorted(set(kinds)))
        said.append(
            f"{len(kinds)} of {layers} attention layers were given a processor since that cannot be intercepted "
            f"({named}); it stays until you set another one"
        )
    if backends:
        named = ", ".join(sorted(set(backends)))
        said.append(
            f"{len(backends)} of {layers} attention layers were given another backend of diffusers since ({named}); "
            "disable_attention() and enable it again to take its place"
        )
    return "; ".join(said)
