"""The open book that exchanges change: seconds of a generation by what they go into, and GiB by where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..book import GIB, Ledger
from ..hardware import Hardware
from ..memory import CONTEXT_GIB

RESIDENT, STAGES, LAYERS = "resident", "by stage", "by layer"


@dataclass(frozen=True)
class Account:
    """Where seconds go (`unit` "FLOP": FLOPs in their place, for a machine whose peak is not known), and GiB.

    Attributes:
        steps, branches: of the loop; forwards a step.
        computed: steps in which the denoiser runs; `reused`: what another one costs, as a part of a forward.
        linear, attention, conv: of one forward.
        transfer: of weights that come in during a forward, behind its compute; moved: once a generation.
        weights_gib: by component, "transformer" and "transformer_2" taking turns.
        working_gib, decoding_gib: of live tensors in a forward and in a decode; kept_gib: what a cache keeps.
        place: all weights "resident", or components "by stage", or the denoiser's blocks "by layer", of which
            `live_gib` are on the device at once.
    """

    unit: str
    steps: int
    branches: float
    computed: float
    linear: float
    attention: float
    conv: float
    encode: float
    decode: float
    weights_gib: Mapping[str, float]
    working_gib: float
    decoding_gib: float
    reused: float = 0.0
    transfer: float = 0.0
    moved: float = 0.0
    kept_gib: float = 0.0
    place: str = RESIDENT
    live_gib: float = 0.0

    @property
    def compute(self) -> float:
        """Of one forward."""
        return self.linear + self.attention + self.conv

    @property
    def denoise(self) -> float:
        """Of the loop."""
        full = max(self.compute, self.transfer)
        return self.branches * (self.computed * full + (self.steps - self.computed) * self.reused * self.compute)

    @property
    def total(self) -> float:
        """Of the generation."""
        return self.encode + self.moved + self.denoise + self.decode

    @property
    def denoiser_gib(self) -> float:
        """Weights of the denoisers, both experts."""
        return sum(size for name, size in self.weights_gib.items() if name.startswith("transformer"))

    @property
    def need_gib(self) -> float:
        """On the device at most."""
        text, vae = self.weights_gib.get("text_encoders", 0.0), self.weights_gib.get("vae", 0.0)
        denoising = self.working_gib + self.kept_gib
        if self.place == STAGES:
            one = max(size for name, size in self.weights_gib.items() if name.startswith("transformer"))
            return max(text, one + denoising, vae + self.decoding_gib) + CONTEXT_GIB
        here = self.live_gib if self.place == LAYERS else self.denoiser_gib
        return text + vae + here + max(denoising, self.decoding_gib) + CONTEXT_GIB


def opened(ledger: Ledger) -> Account:
    """The book as the ledger has it: all in bf16, resident, every step computed; seconds where it has some."""
    flops, seconds, asked = ledger.flops, ledger.seconds, ledger.request
    forward = flops.forward
    rate = 1.0 if seconds is None else flops.denoise / seconds.denoise  # FLOP/s reached
    return Account(
        unit="FLOP" if seconds is None else "s",
        steps=asked.steps,
        branches=asked.branches,
        computed=asked.steps,
        linear=forward.linear / rate,
        attention=forward.attention / rate,
        conv=forward.conv / rate,
        encode=flops.encode if seconds is None else seconds.encode,
        decode=float(flops.decode or 0) if seconds is None else seconds.decode,
        weights_gib={name: size / GIB for name, size in ledger.weights_bytes.items()},
        working_gib=(ledger.activation_bytes or 0) / GIB,
        decoding_gib=(ledger.vae_peak_bytes or 0) / 2 / GIB,
    )


def forward_times(account: Account, linear: float = 1.0, attention: float = 1.0, conv: float = 1.0) -> Account:
    """The book with parts of a forward multiplied."""
    return replace(
        account,
        linear=account.linear * linear,
        attention=account.attention * attention,
        conv=account.conv * conv,
    )


def with_steps(account: Account, taken: int) -> Account:
    """The book of a model, or a solver, that takes so many steps, all computed."""
    return replace(account, steps=taken, computed=taken)


def one_branch(account: Account) -> Account:
    """The book of a model whose guidance is distilled into it: no second branch runs."""
    return replace(account, branches=1)


def link_gb_s(machine: Hardware | None) -> float | None:
    """GB/s from the host; None where that is not known."""
    return None if machine is None else machine.host_gb_s
