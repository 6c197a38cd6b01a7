"""U-Nets and pipelines for the tests of DeepCache, a driver of one engine, and a U-Net's forward written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import UNet2DConditionModel

from diffaccel import accelerate
from diffaccel.caching.build import put_on
from diffaccel.caching.engine import CacheRecipe, Engine
from diffaccel.caching.gates.schedule import ScheduleGate
from diffaccel.caching.guards import Guards
from diffaccel.caching.policy import Policy
from diffaccel.caching.scopes.unet import Deep
from diffaccel.core.root import install_root
from diffaccel.core.run import Run, running
from diffaccel.extrapolation.forecast import REUSE
from diffaccel.models.cards.sdxl import CARD
from tests import tiny

OPEN = {"cache": "deepcache", "cache_min_steps": 0, "cache_last_steps": 0}  # no guard in the way
FREEU = {"s1": 0.9, "s2": 0.2, "b1": 1.3, "b2": 1.4}


def unet_of(kind: str) -> Any:
    """A U-Net of the shape of SDXL's (three blocks of two layers), of SD 1.5's, or of `tiny`'s."""
    if kind == "tiny":
        return tiny.build("sdxl").unet
    cross, sizes = kind == "sd15", (8, 16, 16, 16) if kind == "sd15" else (8, 16, 16)
    down = (
        ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",) if cross else ("DownBlock2D",) + ("CrossAttnDownBlock2D",) * 2
    )
    more: dict[str, Any] = (
        {}
        if cross
        else {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 80,
            "use_linear_projection": True,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        unet = UNet2DConditionModel(
            sample_size=8,
            block_out_channels=sizes,
            layers_per_block=2,
            down_block_types=down,
            up_block_types=tuple(name.replace("Down", "Up") for name in reversed(down)),
            attention_head_dim=2,
            norm_num_groups=4,
            cross_attention_dim=64,
            **more,
        )
    tiny.redraw_zeros(unet, torch.Generator().manual_seed(6))
    return unet.eval()


def pipeline(kind: str = "tiny") -> Any:
    """The tiny SDXL pipeline, with another U-Net where asked."""
    pipe = tiny.build("sdxl")
    if kind != "tiny":
        pipe.register_modules(unet=unet_of(kind))
    return pipe


def deep(kind: str = "tiny", **options: Any) -> Any:
    """A fresh pipeline with DeepCache and no guard in the way."""
    return accelerate(pipeline(kind), None, strict=True, **(OPEN | options))


def computed(pipe: Any) -> list[int]:
    """The steps of the last run that were computed."""
    return [step.index for step in pipe.acceleration.report.steps if step.computed]


def inputs_of(unet: Any, size: tuple[int, int] = (8, 8), seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a denoiser call."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    added = {"text_embeds": draw(2, 32), "time_ids": draw(2, 6)} if unet.config.addition_embed_type else None
    return (draw(2, 4, *size), torch.tensor(500 - seed), draw(2, 7, 64)), {"added_cond_kwargs": added}


class Owner:
    """Stands for the handle."""


class Driven:
    """An engine on a U-Net that has no pipeline: `call` is one step of a loop whose mask is given."""

    def __init__(self, unet: Any, branch: int, mask: str, predictor: Any = REUSE, **recipe: Any) -> None:
        self.unet, self.owner = unet, Owner()
        self.root = install_root(unet, "unet", self.owner)
        policy = Policy(ScheduleGate(mask), predictor, Guards())
        spec = CARD if unet.config.addition_embed_type else replace(CARD, family="sd15", config=())
        self.engine: Engine = put_on("deep", unet, self.root, spec, CacheRecipe(policy, Deep(branch), **recipe))
        self.run = Run(SimpleNamespace(scheduler=None), lambda pipe, k: "cond", self.owner)
        self.run.total, self.run.state["deep"] = len(mask), {}

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        with running(self.run), torch.no_grad():
            output: torch.Tensor = self.unet(*args, **kwargs, return_dict=False)[0]
        self.run.tick(None)
        return output

    def undo(self) -> None:
        self.engine.undo()
        assert self.root.link is not None
        self.root.link.remove()


@contextmanager
def calls_of(unet: Any) -> Iterator[list[str]]:
    """Names of the leaf modules that run."""
    names: list[str] = []
    leaves = [(name, module) for name, module in unet.named_modules() if not list(module.children())]
    handles = [
        module.register_forward_hook(lambda *_, name=name: names.append(name))  # type: ignore[misc]
        for name, module in leaves
    ]
    yield names
    for handle in handles:
        handle.remove()


# ---- the U-Net by hand ---------------------------------------------------------------------------------------------


class ByHand:
    """A U-Net's forward as two flat lists of layers; nothing of diffaccel is used.

    Every `interval`-th call runs all of it and keeps what enters the layer that takes skip connection `branch`; the
    others begin the up path there with what was kept.
    """

    def __init__(self, unet: Any, interval: int, branch: int) -> None:
        self.unet, self.interval, self.branch, self.calls = unet, interval, branch, 0
        self.kept: torch.Tensor
        self.down: list[list[Any]] = []  # each ends in a skip connection
        for block in unet.down_blocks:
            self.down += self._layers(block) + [[sampler] for sampler in block.downsamplers or ()]
        self.up: list[list[Any]] = []
        for block in unet.up_blocks:
            layers = self._layers(block)
            layers[-1] += list(block.upsamplers or ())
            self.up += layers

    @staticmethod
    def _layers(block: Any) -> list[list[Any]]:
        attentions = getattr(block, "attentions", [None] * len(block.resnets))
        return [[r] if a is None else [r, a] for r, a in zip(block.resnets, attentions, strict=True)]

    def _run(self, layer: list[Any], x: torch.Tensor, emb: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for module in layer:
            kind = type(module).__name__
            if kind == "ResnetBlock2D":
                x = module(x, emb)
            else:
                x = module(x, text, return_dict=False)[0] if kind == "Transformer2DModel" else module(x)
        return x

    def __call__(self, sample: torch.Tensor, t: Any, encoder_hidden_states: Any = None, **kw: Any) -> Any:
        unet, text, full = self.unet, encoder_hidden_states, self.calls % self.interval == 0
        self.calls += 1
        emb = unet.time_embedding(unet.get_time_embed(sample, t), None)
        emb = emb + unet.get_aug_embed(emb, text, kw["added_cond_kwargs"])
        x = unet.conv_in(sample)
        skips = [x]
        for layer in self.down if full else self.down[: self.branch]:
            x = self._run(layer, x, emb, text)
            skips.append(x)
        if full:
            x = unet.mid_block(x, emb, encoder_hidden_states=text)
        for layer in self.up if full else self.up[len(self.up) - self.branch - 1 :]:
            if len(skips) == self.branch + 1:
                x = self.kept = x if full else self.kept
            x = self._run(layer, torch.cat([x, skips.pop()], dim=1), emb, text)
        return (unet.conv_out(unet.conv_act(unet.conv_norm_out(x))),)
