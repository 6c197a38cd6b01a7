"""The tap of the scope `Deep`: on a reused step only the shallow layers of a U-Net run (DeepCache).

Skip connections lead from the down path to the up path. Below connection `branch` nothing runs on a reused step: the
modules there answer with placeholders of one element, which only meet one another, and the last of them answers with
the forecast of what it would have said, the deep feature. The U-Net's own forward goes on as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ...core.chain import Hook, install
from ...core.compat import eager, unwrap_module
from ...core.run import Call
from ...models.spec import ModelSpec, UNet
from ..engine import Engine
from .config import Deep
from .hooked import Hooked


class Part(NamedTuple):
    """A module that a reused step leaves out; `form` puts one tensor into the form of its output."""

    module: torch.nn.Module
    form: Callable[[torch.Tensor], Any]


def _bare(x: torch.Tensor) -> torch.Tensor:
    return x


def _single(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x,)


def _descent(count: int, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """What a block of the down path returns: its output and its `count` skip connections."""
    return x, (x,) * count


def _layers(block: torch.nn.Module, unet: UNet) -> list[list[Part]]:
    """The layers of a block, in running order."""
    columns = [
        [Part(module, _single if name in unet.tuples else _bare) for module in getattr(block, name)]
        for name in unet.layers
        if getattr(block, name, None) is not None
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _giving(block: torch.nn.Module, unet: UNet) -> list[list[Part]]:
    """What gives skip connections in a block of the down path: its layers, then its samplers."""
    return _layers(block, unet) + [[Part(module, _bare)] for module in getattr(block, unet.samplers, None) or ()]


def branches_of(module: torch.nn.Module, unet: UNet) -> int:
    """How many layers of the up path take a skip connection."""
    return sum(len(_layers(block, unet)) for block in getattr(module, unet.up))


def parts_left_out(module: torch.nn.Module, unet: UNet, branch: int) -> list[Part]:
    """What is deeper than skip connection `branch`, in running order: the last one's output is the deep feature."""
    parts: list[Part] = []
    kept = branch  # connections still to be made; number 0 is the entry layer's
    for block in getattr(module, unet.down):
        giving = _giving(block, unet)
        if kept <= 0:
            parts.append(Part(block, partial(_descent, len(giving))))
        else:
            parts += [part for layer in giving[kept:] for part in layer]
        kept -= len(giving)
    middle = getattr(module, unet.middle)
    if middle is not None:
        parts.append(Part(middle, _bare))
    dropped = branches_of(module, unet) - branch - 1  # layers of the up path still to be left out
    for block in getattr(module, unet.up):
        layers = _layers(block, unet)
        if dropped >= len(layers):
            parts.append(Part(block, _bare))
        else:
            parts += [part for layer in layers[: max(dropped, 0)] for part in layer]
        dropped -= len(layers)
    return parts


def unfit_unet(scope: Deep, module: torch.nn.Module, spec: ModelSpec) -> str | None:
    """Why the deep part of this denoiser cannot be left out, or None."""
    unet = spec.unet
    if unet is None:
        no_unet = "its denoiser is no U-Net, of which DeepCache would reuse the deep part"
        return f"{spec.family}: {spec.no_stack or no_unet}"
    middle = getattr(module, unet.middle)
    blocks = [*getattr(module, unet.down), *([] if middle is None else [middle]), *getattr(module, unet.up)]
    strange = sorted({type(unwrap_module(block)).__name__ for block in blocks} - set(unet.blocks))
    if strange:
        return f"{spec.family}: DeepCache does not know the blocks {', '.join(strange)}"
    taken = branches_of(module, unet)
    if taken != 1 + sum(len(_giving(block, unet)) for block in getattr(module, unet.down)):
        return f"{spec.family}: the up path of this U-Net does not mirror its down path"
    if scope.branch >= taken:
        return f"branch={scope.branch}: this U-Net has the skip connections 0 to {taken - 1}"
    if not parts_left_out(module, unet, scope.branch):
        return f"branch={scope.branch}: nothing would be left to skip"
    return None


class _Ear(Hook):
    """Remembers the deep feature of a computed step."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    @eager
    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        engine = self.engine
        if engine.branch is not None and engine.computing:
            feature = output if isinstance(output, torch.Tensor) else output[0]
            engine.branch.template = feature.dtype
            engine.store((feature.clone(),))  # of its own: FreeU writes into what enters a layer
        return output


class UNetTap(Hooked):
    """Hooks everything deeper than one skip connection of a U-Net."""

    def __init__(self, engine: Engine, scope: Deep) -> None:
        super().__init__()
        self.engine = engine
        assert engine.spec.unet is not None
        *self.blank, self.source = parts_left_out(engine.module, engine.spec.unet, scope.branch)
        try:
            for part in self.blank:
                self.links.append(install(part.module, Hook(), engine.name, outermost=True))
            self.links.append(install(self.source.module, _Ear(engine), engine.name, outermost=True))
        except BaseException:
            self.undo()
            raise

    @eager
    def skip(self) -> None:
        """From here on the deep part answers with placeholders, and at its end with the forecast."""
        main = self.engine.main
        nothing = main.new_zeros((1,) * main.ndim)  # not empty: FreeU takes the Fourier transform of it
        answers: list[Callable[..., Any]] = [partial(_say, part.form(nothing)) for part in self.blank]
        for link, answer in zip(self.links, [*answers, self._recall], strict=True):
            self.stand_in(link, answer)

    @eager
    def _recall(self, *args: Any, **kwargs: Any) -> Any:
        """The deep feature, in the form of its module's output."""
        engine = self.engine
        assert engine.branch is not None
        feature = engine.forecast()[0].to(engine.branch.template, copy=True)  # a copy: FreeU would write into it
        return self.source.form(feature)

    def release(self, call: Call) -> None:
        """Give the modules their forwards back."""
        self.put_back()


def _say(answer: Any, *args: Any, **kwargs: Any) -> Any:
    return answer
