"""What every attention lever does alike: ask whether attention can be intercepted, and put a handler on the seam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.accelerator import Edit, Site, Target, Verdict
from ..core.run import Run
from ..errors import UnsupportedModelError
from .calls import Handler
from .intercept import Interception
from .processors import form, processors


def interceptable(target: Target) -> Verdict:
    """Yes, where some attention of the denoisers can be intercepted; else no, with the reason."""
    modules = [getattr(target.pipe, name, None) for name in target.spec.denoisers]
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
    """Open a seam with `handler` on every denoiser; the edit closes them again.

    `inline` is a diffusers backend that compiled graphs may call themselves.
    """
    seams: list[tuple[Interception, Any]] = []

    def undo() -> None:
        for seam, root in reversed(seams):
            seam.close(root)
        seams.clear()

    def relink() -> None:
        for seam, _ in seams:
            seam.route()  # processors that were set since

    try:
        for component, root in site.roots.items():
            seam = Interception(getattr(target.pipe, component), target.spec, handler)
            seam.inline = inline
            seams.append((seam, root))
            seam.open(root)
    except BaseException:
        undo()
        raise
    return Edit(name, undo, begin_run=begin_run, relink=relink, stats=stats)
