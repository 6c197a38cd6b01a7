"""Which layers are quantized and which stay as they are: one policy for every scheme.

Quantized are the Linear layers inside a model's repeated blocks. Kept are, wherever they are, what turns conditions
into shifts, scales and gates (adaLN modulation), embedders, norms and the final projection: few bytes, large errors.
This is the union of what diffusers' quantizers, cache-dit and nunchaku keep.

`sensitivity.py` measures the error of each layer, and chooses by it what else to keep within a budget.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from ..core.options import BOOLEAN, short, take, whole
from ..core.wrappers import own_modules
from ..errors import InvalidOptionError

if TYPE_CHECKING:
    from ..models.spec import ModelSpec

# (what is matched against each part of a layer's path inside its block, why the layer is kept)
ALWAYS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"norm"), "norm or the modulation of a norm"),
    (re.compile(r"(^|_)mod(ulation)?(_|$)|adaln|scale_shift", re.I), "adaLN modulation"),
    (re.compile(r"emb(ed|$|_)", re.I), "embedder"),
    (re.compile(r"^(router|.*_router)$"), "router"),
)
# Layers of the text stream in blocks of two streams.
TEXT = re.compile(r"(^|\.)(add_[qkv]_proj|to_add_out|ff_context|ffn_context|txt_\w+|\w+_context)(\.|$)")
# The second layer of a feed-forward: its input (after the activation) has the largest outliers.
FF_OUT = re.compile(r"(^|\.)((ff|ffn|ff_context|\w+_ff|\w+_mlp)\.net\.2|ff(_context)?\.linear_out|feed_forward\.w2)$")

OUTSIDE = "outside of the repeated blocks (embedders, final layers)"


@dataclass(frozen=True)
class Policy:
    """What stays in high precision besides modulation, embedders, norms and everything outside of the blocks.

    Attributes:
        first_blocks, last_blocks: how many blocks of the whole stack, counted from its ends, are kept.
        last_text: keep the text stream of the last block that has one (nothing reads most of what it makes).
        ff_out: keep the second layer of every feed-forward.
        keep: regular expressions searched in the full name of a layer; a hit is kept.
        convs: quantize convolutions inside the blocks too (schemes that only store weights can).
        multiple_of: keep layers whose input or output features are no multiple of this.

    Raises:
        InvalidOptionError: a negative count, or an expression that does not compile.
    """

    first_blocks: int = 0
    last_blocks: int = 0
    last_text: bool = False
    ff_out: bool = False
    keep: tuple[str, ...] = ()
    convs: bool = False
    multiple_of: int = 1

    def __post_init__(self) -> None:
        take(self, whole(0), "first_blocks", "last_blocks")
        take(self, whole(1), "multiple_of")
        take(self, BOOLEAN, "last_text", "ff_out", "convs")
        if not isinstance(self.keep, (str, list, tuple)):
            raise InvalidOptionError(f"keep={short(self.keep)}: must be a regular expression or a list of them")
        keep = (self.keep,) if isinstance(self.keep, str) else tuple(self.keep)
        object.__setattr__(self, "keep", keep)
        for expression in keep:
            try:
                re.compile(expression)
            except (re.error, TypeError) as error:
                raise InvalidOptionError(f"keep={expression!r}: not a regular expression ({error})") from None


@dataclass(frozen=True)
class Selection:
    """Names of layers (relative to the model): those to quantize, in order, and those kept with the reason."""

    quantized: tuple[str, ...]
    kept: Mapping[str, str]

    def __str__(self) -> str:
        reasons: dict[str, list[str]] = {}
        for name, why in self.kept.items():
            reasons.setdefault(why, []).append(name)
        lines = [f"{len(self.quantized)} layers quantized, {len(self.kept)} kept"]
        for why, names in reasons.items():
            lines.append(f"  {len(names):4d} {why}: {', '.join(_shorten(names))}")
        return "\n".join(lines)

    def summary(self) -> str:
        """One line for a plan: how many layers, and how many are kept for each reason."""
        counts: dict[str, int] = {}
        for why in self.kept.values():
            counts[why] = counts.get(why, 0) + 1
        kept = "; ".join(f"{count} {why}" for why, count in counts.items())
        return f"{len(self.quantized)} layers" + (f" (kept: {kept})" if kept else "")


def select(module: nn.Module, spec: ModelSpec, policy: Policy | None = None) -> Selection:
    """Which layers of a denoiser a scheme may quantize.

    Args:
        module: the denoiser (may be on the meta device).
        spec: its card; its block lists (or the parts of its U-Net) are what is quantized.
        policy: what else is kept; None is `Policy()`.

    Returns:
        The selection; `quantized` is empty where the spec knows of no blocks.
    """
    policy = policy or Policy()
    return _select(module, list(_blocks(module, spec)), policy)


def select_encoder(module: nn.Module, policy: Policy | None = None) -> Selection:
    """The same for a text encoder: the Linear layers below its lists of layers (no heads, no embeddings)."""
    policy = policy or Policy()
    paths = [
        f"{name}.{index}"
        for name, child in own_modules(module).items()
        if isinstance(child, nn.ModuleList) and len(child) and not _inside_list(module, name)
        for index in range(len(child))
    ]
    return _select(module, paths, policy)


def layers(module: nn.Module, convs: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Every Linear layer (and convolution) of a model with its name, each module once."""
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.modules.conv._ConvNd) if convs else (nn.Linear,)
    for name, child in own_modules(module).items():
        if isinstance(child, kinds) and not _is_adapter(name):
            yield name, child


def _select(module: nn.Module, blocks: list[str], policy: Policy) -> Selection:
    quantized: list[str] = []
    kept: dict[str, str] = {}
    texts = [b for b in blocks if any(TEXT.search(n) for n, _ in module.get_submodule(b).named_modules())]
    for name, layer in layers(module, policy.convs):
        block = next((b for b in blocks if name == b or name.startswith(f"{b}.")), None)
        why = OUTSIDE if block is None else _why_kept(name, block, layer, blocks, texts, policy)
        if why is None:
            quantized.append(name)
        else:
            kept[name] = why
    return Selection(tuple(quantized), kept)


def _why_kept(
    name: str, block: str, layer: nn.Module, blocks: list[str], texts: list[str], policy: Policy
) -> str | None:
    inside = name.removeprefix(block).lstrip(".")
    for pattern, why in ALWAYS:
        if any(pattern.search(part) for part in inside.split(".")):
            return why
    position = blocks.index(block)
    if position < policy.first_blocks:
        return f"one of the first {policy.first_blocks} blocks"
    if position >= len(blocks) - policy.last_blocks:
        return f"one of the last {policy.last_blocks} blocks"
    if policy.last_text and texts and block == texts[-1] and TEXT.search(inside):
        return "text stream of the last block that has one"
    if policy.ff_out and FF_OUT.search(inside):
        return "second layer of a feed-forward"
    for expression in policy.keep:
        if re.search(expression, name):
            return f"matches keep={expression!r}"
    if isinstance(layer, nn.Linear) and (
        layer.in_features % policy.multiple_of or layer.out_features % policy.multiple_of
    ):
        return f"features are no multiple of {policy.multiple_of}"
    weight = getattr(layer, "weight", None)  # an SvdQuantLinear has none
    if weight is not None and not weight.dtype.is_floating_point:
        return "no floating-point weight"
    return None


def _blocks(module: nn.Module, spec: ModelSpec) -> Iterator[str]:
    """Paths of the blocks in running order."""
    for row in spec.stack:
        for index in range(len(getattr(module, row.attribute, ()))):
            yield f"{row.attribute}.{index}"
    if spec.unet is not None:
        for name in (spec.unet.down, spec.unet.middle, spec.unet.up):
            part = getattr(module, name, None)
            if isinstance(part, nn.ModuleList):
                yield from (f"{name}.{index}" for index in range(len(part)))
            elif part is not None:
                yield name


def _inside_list(module: nn.Module, name: str) -> bool:
    """Is a list of layers itself inside an entry of another one?"""
    parts = name.split(".")
    return any(isinstance(module.get_submodule(".".join(parts[:i])), nn.ModuleList) for i in range(1, len(parts)))


def _is_adapter(name: str) -> bool:
    """A layer of a LoRA that peft put beside its base layer: never quantized."""
    return any(part.startswith(("lora_", "modules_to_save")) for part in name.split("."))


def _shorten(names: list[str]) -> list[str]:
    """Names that differ in their numbers only, as one pattern with a count."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return [group[0] if len(group) == 1 else f"{pattern} x{len(group)}" for pattern, group in found.items()]
