"""Ledger: what one generation costs, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .exchange.stack import PlanLike, Stack
    from .hardware import Hardware
    from .timing import Seconds

GIB = 1024**3


@dataclass(frozen=True)
class Request:
    """What is made: pixels, frames (None: a picture), steps, forwards a step, lengths of the text's streams."""

    height: int
    width: int
    frames: int | None
    steps: int
    branches: int
    text_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Forward:
    """FLOPs of one forward of the denoiser: one branch, batch 1."""

    linear: int
    attention: int
    conv: int

    @property
    def total(self) -> int:
        """All kinds."""
        return self.linear + self.attention + self.conv


@dataclass(frozen=True)
class Flops:
    """FLOPs (2 for a multiply and an add) of one generation by stage; None where a stage could not be counted."""

    forward: Forward
    denoise_step: int
    denoise: int
    encode: int
    decode: int | None

    @property
    def total(self) -> int:
        """All stages that were counted."""
        return self.denoise + self.encode + (self.decode or 0)


@dataclass(frozen=True)
class Ledger:
    """The book of one generation.

    Attributes:
        model, origin: what was counted, and from what ("bundled config", "folder, ...", "live pipeline").
        params: {"transformer", "vae", "vae_decoder", "text_encoders": {name: ...}}; "transformer" is the
            denoiser, a UNet too; of two experts the second is "transformer_2".
        tokens: of the longest self-attention: image, and text where both are one sequence.
        image_tokens: of the image or clip alone.
        per_token: parameters that one image token, one text token, and the condition (one row) pass through.
        weights_bytes: by component in bf16, text encoders together.
        activation_bytes: peak of one forward in bf16, one branch; None where unknown.
        vae_peak_bytes: peak of decoding in fp32 as diffusers decodes by default; half of it in bf16.
        seconds: predicted, where a machine was named.
        uncertain: what in the config is not certain.
    """

    model: str
    origin: str
    request: Request
    params: Mapping[str, Any]
    tokens: int
    image_tokens: int
    per_token: Mapping[str, int]
    flops: Flops
    weights_bytes: Mapping[str, int]
    activation_bytes: int | None
    vae_peak_bytes: int | None
    seconds: Seconds | None = None
    uncertain: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def attention_share(self) -> float:
        """Part of a forward's FLOPs that attention is, 0 to 1."""
        return self.flops.forward.attention / self.flops.forward.total

    @property
    def weights_gib(self) -> dict[str, float]:
        """By component."""
        return {name: size / GIB for name, size in self.weights_bytes.items()}

    @property
    def denoiser_bytes(self) -> int:
        """Weights of the denoiser that runs in a step (one expert), bf16."""
        return self.weights_bytes["transformer"]

    @property
    def intensity(self) -> float:
        """FLOPs of a forward per byte of the denoiser's weights; with activations' traffic it is lower."""
        return self.flops.forward.total / self.denoiser_bytes

    def apply(self, plan: PlanLike | Iterable[str], hardware: str | Hardware | None = None) -> Stack:
        """What the items of a plan, or items of these names with their defaults, do to seconds and bytes, in turn.

        `hardware`: the machine; None: that of `seconds`. Without either, FLOPs stand in for seconds.
        """
        found: Stack = import_module(f"{__package__}.exchange.stack").stacked(
            self, plan, hardware
        )  # loaded when asked
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data = asdict(self)
        data["flops"]["forward"]["total"] = self.flops.forward.total
        data["flops"]["total"] = self.flops.total
        data |= {"attention_share": self.attention_share, "weights_gib": self.weights_gib}
        return data | {"intensity": self.intensity}
