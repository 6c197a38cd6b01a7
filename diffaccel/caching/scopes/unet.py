"""The scope `Deep`: on a reused step only the shallow layers of a U-Net run (DeepCache).

Skip connections lead from the down path to the up path. Below connection `branch` nothing runs on a reused step: the
modules there answer with placeholders of one element, which only meet one another, and the last of them answers with
the forecast of what it would have said, the deep feature. The U-Net's own forward goes on as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ...core.chain import Hook, install
from ...core.compat import eager, unwrap_module
from ...core.options import GOT, take, whole
from ...core.run import Call
from ...models.spec import ModelSpec, UNet
from ..engine import Engine, Scope
from ..gates.base import IN_BLOCKS
from ..policy import Policy
from .stand_ins import StandIns


class DeepPart(NamedTuple):
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


def _layers(block: torch.nn.Module, unet: UNet) -> list[list[DeepPart]]:
    """The layers of a block, in running order."""
    columns = [
        [DeepPart(module, _single if name in unet.tuples else _bare) for module in getattr(block, name)]
        for name in unet.layers
        if getattr(block, name, None) is not None
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _giving(block: torch.nn.Module, unet: UNet) -> list[list[DeepPart]]:
    """What gives skip connections in a block of the down path: its layers, then its samplers."""
    return _layers(block, unet) + [[DeepPart(module, _bare)] for module in getattr(block, unet.samplers, None) or ()]


def branches_of(module: torch.nn.Module, unet: UNet) -> int:
    """How many layers of the up path take a skip connection."""
    return sum(len(_layers(block, unet)) for block in getattr(module, unet.up))


def parts_left_out(module: torch.nn.Module, unet: UNet, branch: int) -> list[DeepPart]:
    """What is deeper than skip connection `branch`, in running order: the last one's output is the deep feature."""
    parts: list[DeepPart] = []
    kept = branch  # connections still to be made; number 0 is the entry layer's
    for block in getattr(module, unet.down):
        giving = _giving(block, unet)
        if kept <= 0:
            parts.append(DeepPart(block, partial(_descent, len(giving))))
        else:
            parts += [part for layer in giving[kept:] for part in layer]
        kept -= len(giving)
    middle = getattr(module, unet.middle)
    if middle is not None:
        parts.append(DeepPart(middle, _bare))
    dropped = branches_of(module, unet) - branch - 1  # layers of the up path still to be left out
    for block in getattr(module, unet.up):
        layers = _layers(block, unet)
        if dropped >= len(layers):
            parts.append(DeepPart(block, _bare))
        else:
            parts += [part for layer in layers[: max(dropped, 0)] for part in layer]
        dropped -= len(layers)
    return parts


def unfit_unet(branch: int, module: torch.nn.Module, spec: ModelSpec) -> str | None:
    """Why the deep part of this denoiser cannot be left out, or None."""
    unet = spec.unet
    if unet is None:
        no_unet = "its denoiser is no U-Net, of which DeepCache would reuse the deep part"
        return f"{spec.family}: {spec.no_stack or no_unet}"
    middle = getattr(module, unet.middle)
    blocks = [*getattr(module, unet.down), *([] if middle is None else [middle]), *getattr(module, unet.up)]
    foreign = sorted({type(unwrap_module(block)).__name__ for block in blocks} - set(unet.blocks))
    if foreign:
        return f"{spec.family}: DeepCache does not know the blocks {', '.join(foreign)}"
    taken = branches_of(module, unet)
    if taken != 1 + sum(len(_giving(block, unet)) for block in getattr(module, unet.down)):
        return f"{spec.family}: the up path of this U-Net does not mirror its down path"
    if branch >= taken:
        return f"branch={branch}: this U-Net has the skip connections 0 to {taken - 1}"
    if not parts_left_out(module, unet, branch):
        return f"branch={branch}: nothing would be left to skip"
    return None


@dataclass(frozen=True)
class Deep(Scope):
    """All of a U-Net that lies deeper than its skip connection `branch` (DeepCache).

    Skip connections count from 0, the shallowest, which is the entry layer's output. On a reused step only the layers
    run that make the connections 0 to `branch`, and those that take them; what is remembered is the feature
    [B, C, H, W] that enters the first of the latter.
    """

    branch: int = 0

    def __post_init__(self) -> None:
        take(self, whole(0), "branch", form=GOT)

    def unfit(self, policy: Policy, module: torch.nn.Module, spec: ModelSpec) -> str | None:
        """Needs a U-Net of known blocks, and a gate that does not look at blocks."""
        looks = f"a gate that looks at blocks cannot decide here: {spec.no_stack}"
        return unfit_unet(self.branch, module, spec) or (looks if policy.gate.observes in IN_BLOCKS else None)

    def left_out(self, module: torch.nn.Module, spec: ModelSpec) -> list[torch.nn.Module]:
        """Everything deeper than the skip connection."""
        return [] if spec.unet is None else [part.module for part in parts_left_out(module, spec.unet, self.branch)]

    def install(self, engine: Engine) -> DeepHooks:
        """Hook the deep part."""
        return DeepHooks(engine, self)


class _FeatureRecorder(Hook):
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


class DeepHooks(StandIns):
    """Hooks everything deeper than one skip connection of a U-Net."""

    def __init__(self, engine: Engine, scope: Deep) -> None:
        super().__init__()
        self.engine = engine
        assert engine.spec.unet is not None
        *self.blank, self.source = parts_left_out(engine.module, engine.spec.unet, scope.branch)
        try:
            for part in self.blank:
                self.links.append(install(part.module, Hook(), engine.name, outermost=True))
            self.links.append(install(self.source.module, _FeatureRecorder(engine), engine.name, outermost=True))
        except BaseException:
            self.undo()
            raise

    @eager
    def skip(self) -> None:
        """From here on the deep part answers with placeholders, and at its end with the forecast."""
        main = self.engine.main
        nothing = main.new_zeros((1,) * main.ndim)  # not empty: FreeU takes the Fourier transform of it
        answers: list[Callable[..., Any]] = [partial(_constant, part.form(nothing)) for part in self.blank]
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


def _constant(answer: Any, *args: Any, **kwargs: Any) -> Any:
    return answer
