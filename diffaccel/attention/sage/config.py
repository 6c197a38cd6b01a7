"""8-bit attention (SageAttention) that never changes a picture in silence: what does not fit is computed as before.

Source: SageAttention, arXiv 2410.02367; version 2, arXiv 2411.10958; version 3, arXiv 2505.11594.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ...core.compat import unwrap_module
from ...core.options import BOOLEAN, Check, take
from ...core.run import Run
from ...core.state import PerRun
from ...errors import InvalidOptionError, MissingDependencyError, unknown
from ..attach import attach_handler, interceptable
from ..backends import ALL, SAGE, Backend, unfit, unfit_call
from ..calls import Counts, Inputs, Where, with_lse
from ..choice import head_dim_of
from ..padding import PaddingReader
from ..processors import form, processors
from .variants import ALWAYS_SMOOTH, attend, kernel_of

WAITING = ("cuda",)  # devices that run behind the host: a look at their results waits for them
AUTO = ("2", "1", "triton")  # best first; a call that one of them cannot serve goes to the next
NAME = "attention.sage"
MASKED = "its mask hides more than padding at the end"
NOT_FINITE = "8-bit attention gave numbers that are not finite"
ZEROS = "8-bit attention gave rows of zeros"
ON_CPU = (
    "8-bit attention gains nothing on a CPU: PyTorch has no fused 8-bit attention there, and the computation in "
    "single operations takes about twice as long as plain attention (variant='reference' runs it all the same)"
)


EIGHT_BIT_VALUES = ("2", "3", "hub")  # variants whose products with the values are in 8 bits (3: in 4)


@dataclass(frozen=True)
class SageAttention:
    """Compute self-attention with queries and keys in 8 bits.

    Cross-attention and what stands outside of the blocks (text refiners) stay as they are: too short to gain. A mask
    that hides padding at the end is obeyed by cutting the padding off; with any other mask, or where a call does not
    fit the kernel, the call is computed as in the plain pipeline, counted, and said once.

    Attributes:
        variant: "auto" (the best that is installed and fits: 2, 1, then our own Triton kernel), "1" (sageattention
            1.x from PyPI), "2" (built from source), "3" (sageattn3: 4 bits, Blackwell), "hub" (version 2 as a binary
            that diffusers fetches from the hub and runs), "triton" (our own), or "reference" (our own in plain
            PyTorch, on any device, slow).
        smooth_k: take the mean over the keys out of K before it is rounded; off only for experiments.
        guard: look at results and, where they are not finite or have rows of zeros (black pictures), compute that
            layer as the plain pipeline does for the rest of the run. True looks at each layer's first result in a run,
            since a look makes a GPU wait, and reads at the run's end whether any later one was not finite;
            "every" looks at all of them; False at none. On a CPU, True looks at all: nothing waits there.

    Raises:
        InvalidOptionError: a value that is not allowed.
    """

    variant: str = "auto"
    smooth_k: bool = True
    guard: bool | str = True

    name: ClassVar[str] = NAME
    slot: ClassVar[Slot] = Slot.CALL
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY

    def __post_init__(self) -> None:
        if not isinstance(self.variant, str):
            raise InvalidOptionError(f"variant={self.variant!r}: must be text, such as 'auto' or '1'")
        if self.variant != "auto" and self.variant not in SAGE:
            raise unknown("variant of SageAttention", str(self.variant), ["auto", *SAGE])
        take(self, BOOLEAN, "smooth_k")
        take(self, Check("True, False or 'every'", lambda value: value == "every" or BOOLEAN.good(value)), "guard")
        if not self.smooth_k and self.variant in ALWAYS_SMOOTH:
            raise InvalidOptionError(f"smooth_k=False: variant {self.variant!r} always smooths K")

    def _candidates(self) -> tuple[str, ...]:
        if self.variant != "auto":
            return (self.variant,)
        return tuple(name for name in AUTO if self.smooth_k or name not in ALWAYS_SMOOTH)

    def chain(self, target: Target) -> tuple[list[Backend], list[str]]:
        """(variants that can serve some layer of the target, best first; why each of the others cannot)."""
        fit, reasons = [], []
        wanted = sorted(set(_needs(target)))
        for backend in map(SAGE.__getitem__, self._candidates()):
            answers = [unfit(backend, target.hardware, dtype, dim or None) for dtype, dim in wanted]
            if any(answer is None for answer in answers):
                fit.append(backend)
            elif answers:
                reasons.append(str(answers[0]))
        return fit, reasons

    def check(self, target: Target) -> Verdict:
        """Needs attention that can be intercepted, a GPU (but for the reference), and a kernel that fits."""
        verdict = interceptable(target)
        if not verdict.ok:
            return verdict
        if target.hardware.kind == "cpu" and self.variant != "reference":
            return Verdict.no(ON_CPU, InvalidOptionError)
        fit, reasons = self.chain(target)
        if not fit:
            missing = any("installed" in reason for reason in reasons)
            return Verdict.no("; ".join(reasons), MissingDependencyError if missing else InvalidOptionError)
        slow = "; the reference is slower than plain attention" if fit[0].name == "reference" else ""
        return Verdict.yes(f"variant {', then '.join(backend.name for backend in fit)}{slow}")

    def predict(self, target: Target) -> Mapping[str, Any]:
        """In how many bits the kernel that comes first computes scores, and products with the values."""
        name = self.chain(target)[0][0].name
        bits = {"score_bits": 8, "value_bits": 8 if name in EIGHT_BIT_VALUES else 16}
        return {**(bits if name != "reference" else {"score_bits": 16, "value_bits": 16}), "origin": "computed"}

    def attach(self, target: Target, site: Site) -> Edit:
        """Intercept the attention of every denoiser."""
        fit, reasons = self.chain(target)
        kernels, failed = _loaded(fit)
        if not kernels:
            raise MissingDependencyError(f"{NAME}: {'; '.join(failed or reasons)}")
        handler = SageHandler(self, kernels)
        return attach_handler(NAME, target, site, handler, handler.begin_run, handler.stats)


def _loaded(fit: Iterable[Backend]) -> tuple[list[tuple[Backend, Any]], list[str]]:
    """(variants with their kernels, why the others could not be imported)."""
    kernels, failed = [], []
    for backend in fit:
        try:
            kernels.append((backend, kernel_of(backend.name)))
        except (ImportError, OSError, RuntimeError, ValueError) as error:  # not built for this PyTorch, say
            failed.append(f"variant {backend.name!r} is installed but cannot be used: {error}")
    return kernels, failed


def _needs(target: Target) -> Iterable[tuple[str, int]]:
    """(dtype, head_dim or 0) of the attention layers of the denoisers."""
    for name in target.spec.denoisers:
        module = getattr(target.pipe, name, None)
        if module is None:
            continue
        dtypes = (str(p.dtype).removeprefix("torch.") for p in unwrap_module(module).parameters())
        dtype = next((d for d in dtypes if d in ALL), "bfloat16")  # weights may be kept in 8 bits
        for _, attention, processor in processors(module):
            if form(processor) is not None:
                yield dtype, head_dim_of(attention) or 0


class SageHandler:
    """Answers self-attention of the blocks in 8 bits where that can be; says and counts where not."""

    def __init__(self, lever: SageAttention, kernels: list[tuple[Backend, Any]]) -> None:
        self.lever, self.kernels = lever, kernels
        self.padding = PaddingReader()

    def begin_run(self, run: Run) -> None:
        """A run begins: count anew, trust every layer anew."""
        self.padding.forget()
        run.state[NAME] = PerRun({"counts": Counts(), "off": {}, "seen": {}})

    def stats(self, run: Run) -> dict[str, Any]:
        """Calls by variant, fallbacks by reason, layers that were given up."""
        self.padding.forget()
        state = run.state.get(NAME)
        if not state:
            return {}
        late = {key: ok for key, ok in state["seen"].items() if ok is not None}
        broken = [key[1] for key, fine in zip(late, _read(late.values()), strict=True) if not fine]
        if broken:
            _say(run, f"{NAME}: {NOT_FINITE} after the first look at {', '.join(broken)}; the result may be spoiled. "
                      "guard='every' looks at each result and computes those layers plainly")  # fmt: skip
        return {**state["counts"].stats(), "layers_off": sorted(name for _, name in state["off"])}

    def __call__(self, where: Where, inputs: Inputs, plain: Callable[[], Any]) -> Any:
        """Answer one attention call."""
        state = where.call.run.state[NAME]
        counts: Counts = state["counts"]
        if where.cross or where.layer < 0:
            counts.add("other")
            return _plainly(inputs, plain)
        key = (where.call.component, where.name)
        choice = state["off"].get(key) or self._choose(inputs)
        if isinstance(choice, str):
            counts.fall_back(where, NAME, choice)
            return _plainly(inputs, plain)
        name, kernel, valid = choice
        found = attend(name, kernel, inputs, valid, self.lever.smooth_k)
        output = found[0] if inputs.lse else found
        if inputs.mask is not None and inputs.mask.shape[2] > 1:  # padded queries see no key, and nobody reads them
            output = output[:, : min(valid)]
        wrong = self._look(state["seen"], key, output)
        if wrong is not None:
            state["off"][key] = f"{wrong} in this layer"
            _say(where.call.run, f"{NAME}: {wrong} at {where.name}; that layer is computed plainly from here on")
            counts.fall_back(where, NAME, state["off"][key])
            return _plainly(inputs, plain)
        counts.add(name)
        return found

    def _choose(self, inputs: Inputs) -> tuple[str, Any, tuple[int, ...]] | str:
        """(variant, kernel, valid keys of each sample) of the first variant that takes the call, or why none does."""
        q, mask, (batch, keys, heads, dim) = inputs.q, inputs.mask, inputs.k.shape
        valid = self.padding.read(mask, batch, q.shape[1], keys)
        if valid is None:
            return MASKED
        if min(valid) == 0:
            return "its mask hides all keys of a sample"
        if mask is not None and (inputs.causal or (inputs.lse and mask.shape[2] > 1)):
            return "it has a mask beside causal attention, or for a log-sum-exp of padded queries"
        reasons = []
        for backend, kernel in self.kernels:
            reason = None
            for n in sorted(set(valid)):
                reason = reason or unfit_call(
                    backend, q.shape, (batch, n, heads, dim), q.dtype, q.device.type, False, inputs.causal,
                    inputs.gqa, inputs.lse, inputs.scale,
                )  # fmt: skip
            if reason is None:
                return backend.name, kernel, valid
            reasons.append(reason)
        return reasons[0]

    def _look(self, seen: dict[tuple[str, str], Any], key: tuple[str, str], output: torch.Tensor) -> str | None:
        """What is wrong with a result, or None; a later one on a GPU is only marked, to be read at the run's end."""
        if not self.lever.guard:
            return None
        if key in seen and output.device.type in WAITING and self.lever.guard != "every":
            fine = torch.isfinite(output.sum(dtype=torch.float32))
            seen[key] = fine if seen[key] is None else fine & seen[key]
            return None
        seen.setdefault(key, None)
        finite, zero = torch.stack([torch.isfinite(output).all(), (output == 0).all(-1).any()]).tolist()
        return NOT_FINITE if not finite else ZEROS if zero else None


def _plainly(inputs: Inputs, plain: Callable[[], Any]) -> Any:
    return with_lse(inputs, plain()) if inputs.lse else plain()


def _read(flags: Iterable[torch.Tensor]) -> list[bool]:
    found = [flag.cpu() for flag in flags]
    return torch.stack(found).tolist() if found else []


def _say(run: Run, text: str) -> None:
    run.note(text)
    warnings.warn(text, RuntimeWarning, stacklevel=2)
