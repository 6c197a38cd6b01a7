"""The lever: 4-bit weights and activations with a low-rank branch, in place on a live pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ...core.compat import copies_held, unwrap_module
from ...core.options import Check, choose_name, number, take, take_plain, whole
from ...core.run import Run
from ...core.wrappers import own_modules
from ...errors import DiffaccelError, IncompatibleError, InvalidOptionError
from .. import originals
from ..originals import Checkpoint as Source
from ..originals import Originals
from ..others import HOLDERS, denoisers, quantized_before
from ..plain_loads import refuse_plain_loads
from ..policy import Policy
from ..swap import ON_META, held_of, replaced_in_words, taken_away, users
from ..weights import gib_of, tensor_bytes, weight_bytes
from .backends import AUTO, BACKENDS, NUNCHAKU, Chosen, choose
from .calibration import DEFAULT_MAX_BYTES
from .checkpoint import Checkpoint
from .formats import PRECISIONS
from .jobs import quantize_job
from .linear import Installed, SvdQuantLinear, install, refusal, uninstall
from .math import ALPHAS, Layer, Recipe
from .nunchaku_files import NunchakuFile
from .ptq import Settings, Work, calibrate, works
from .runners import runner

ALPHA = Check("a number from 0 to 1, or 'search'", lambda value: value == "search" or number(0, 1).good(value))
SIZE = Check(
    "(width, height) or (width, height, frames)",
    lambda value: isinstance(value, (list, tuple)) and len(value) in (0, 2, 3) and all(map(whole(1).good, value)),
)
_POLICY = [f.name for f in fields(Policy) if f.name not in ("convs", "multiple_of")]


@dataclass(frozen=True)
class SvdQuant:
    """SVDQuant: a low-rank branch in 16 bits takes the outliers, what is left is quantized to 4 bits.

    Attributes:
        checkpoint: a file made by `diffaccel quantize` (or its folder), or one in nunchaku's layout, for this model.
            None quantizes the live weights, now.
        precision: "int4" or "nvfp4" (a checkpoint has its own).
        rank: of the branch.
        alpha: strength of the smoothing, or "search" for the best of several for each layer (which takes some eight
            times as long, and gave no better whole model on 12 blocks).
        refine: rounds in which the branch is fitted again to what the codes miss.
        calibration: prompts to run (plain) before quantizing live. Without any, nothing is known of the activations,
            and nothing is smoothed: worse by some decibels.
        calibration_steps: denoising steps of each of those runs.
        calibration_size: (width, height) of those runs, or (width, height, frames); None is the pipeline's default.
        backend: "auto", "nunchaku" (4-bit kernels, Turing to Blackwell but not Hopper), "triton" (16-bit
            activations), "triton_int8" (8-bit activations) or "torch" (any device; exact, slow).
        keep_original: where the original weights stay for undo, as of FP8: "source", "disk", "host", "no", or None.
        first_blocks, last_blocks, last_text, ff_out, keep: see `quantization.policy.Policy`.

    Raises:
        InvalidOptionError: a value that is not allowed.
    """

    checkpoint: str | None = None
    precision: str = "int4"
    rank: int = 32
    alpha: float | str = 0.5
    refine: int = 0
    calibration: tuple[str, ...] = ()
    calibration_steps: int = 4
    calibration_size: tuple[int, ...] = ()
    backend: str = AUTO
    keep_original: str | None = None
    first_blocks: int = 0
    last_blocks: int = 0
    last_text: bool = False
    ff_out: bool = False
    keep: tuple[str, ...] = ()

    name: ClassVar[str] = "quantization.svdquant"
    slot: ClassVar[Slot] = Slot.WEIGHT
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY

    def __post_init__(self) -> None:
        take_plain(self)
        choose_name(self, "precision", PRECISIONS)
        choose_name(self, "backend", BACKENDS)
        if self.keep_original is not None:
            choose_name(self, "keep_original", originals.MODES)
        take(self, whole(0), "rank", "refine")
        take(self, whole(1), "calibration_steps")
        take(self, ALPHA, "alpha")
        prompts = (self.calibration,) if isinstance(self.calibration, str) else self.calibration
        if not isinstance(prompts, (list, tuple)) or not all(isinstance(prompt, str) for prompt in prompts):
            raise InvalidOptionError(f"calibration={self.calibration!r}: must be prompts, as a list of text")
        object.__setattr__(self, "calibration", tuple(prompts))
        take(self, SIZE, "calibration_size")
        object.__setattr__(self, "calibration_size", tuple(self.calibration_size))
        if self.checkpoint is not None:
            if not isinstance(self.checkpoint, str):
                object.__setattr__(self, "checkpoint", str(self.checkpoint))
            if prompts:
                raise InvalidOptionError("calibration is for quantizing live weights; checkpoint has been calibrated")
        object.__setattr__(self, "keep", self._policy().keep)

    def _policy(self) -> Policy:
        return Policy(**{name: getattr(self, name) for name in _POLICY})

    def settings(self, half: torch.dtype = torch.bfloat16) -> Settings:
        """What a live quantization does; factors are held in `half`."""
        alpha = ALPHAS if isinstance(self.alpha, str) else (float(self.alpha),)
        recipe = Recipe(self.precision, self.rank, alpha, self.refine, dtype=half)
        return Settings(recipe, self._policy(), steps=self.calibration_steps, max_bytes=DEFAULT_MAX_BYTES)

    def source(self) -> Checkpoint | NunchakuFile | None:
        """The file to read, opened."""
        if self.checkpoint is None:
            return None
        return NunchakuFile(self.checkpoint) if NunchakuFile.is_one(self.checkpoint) else Checkpoint(self.checkpoint)

    def check(self, target: Target) -> Verdict:
        """Needs blocks with plain linear layers, a backend for the machine, and a checkpoint that fits the model."""
        spec = target.spec
        if not (spec.stack or spec.unet):
            return Verdict.no(f"{spec.family}: {spec.no_stack}; no blocks to quantize")
        try:
            source = self.source()
            precision = _precision(source) or self.precision
        except InvalidOptionError as error:
            return Verdict.no(str(error), InvalidOptionError)
        chosen = choose(self.backend, precision, target.hardware, _dtype(target))
        if isinstance(chosen, str):
            return Verdict.refuse(chosen, IncompatibleError)
        try:
            theirs = held_of(target) or quantized_before(denoisers(target))
            todo = [] if theirs else works(target.pipe, spec, self.settings())
        except DiffaccelError as error:
            return Verdict.no(str(error))
        why = theirs or _held(target, todo) or _misfit(source, todo)
        if why is not None:
            return Verdict.refuse(why, IncompatibleError)
        if self.keep_original == originals.SOURCE:
            for work in todo:
                if Source.of(target.pipe, work.component) is None:
                    return Verdict.no(
                        f"keep_original='source': the checkpoint of {work.component} is not on this machine; allowed "
                        "then: 'disk', 'host', 'no'",
                        InvalidOptionError,
                    )
        layers = "; ".join(f"{work.component}: {work.selection.summary()}" for work in todo)
        return Verdict.yes(f"{precision} W4A4, {self._says(source)}; {chosen.reason}; {layers}")

    def _says(self, source: Any) -> str:
        if isinstance(source, NunchakuFile):
            return "from a file in nunchaku's layout (its adaLN and other layers stay the pipeline's own)"
        if source is not None:
            prompts = source.header.recipe.get("prompts", 0)
            kind = f"a checkpoint calibrated on {prompts} prompts" if prompts else "an uncalibrated checkpoint"
            return f"from {kind}"
        if self.calibration:
            return f"calibrated on {len(self.calibration)} prompts now"
        return "not calibrated (nothing smoothed: give calibration=prompts, or a checkpoint of `diffaccel quantize`)"

    def bytes_after(self, target: Target) -> dict[str, int]:
        """Bytes of each denoiser's weights once this is on: four bits a number, scales, low-rank factors."""
        found = {}
        for work in works(target.pipe, target.spec, self.settings()):
            found[work.component] = weight_bytes(work.module)
            for job in work.jobs:
                for name in job.names:
                    weight = work.module.get_submodule(name)._parameters.get("weight")
                    if weight is None:
                        continue  # quantized already
                    rows, columns = weight.shape
                    scales = rows * columns // 16 if self.precision == "nvfp4" else 2 * (rows * columns // 64)
                    factors = 2 * self.rank * (rows + columns) + 2 * columns
                    found[work.component] += rows * columns // 2 + scales + factors - tensor_bytes(weight)
        return found

    def predict(self, target: Target) -> Mapping[str, Any]:
        """GiB of the denoisers' weights once this is on, and in how many bits the products are."""
        chosen = choose(self.backend, self.precision, target.hardware, _dtype(target))
        bits = 4 if not isinstance(chosen, str) and chosen.backend == NUNCHAKU else 16
        return {"denoiser_gib": gib_of(self.bytes_after(target).values()), "product_bits": bits, "origin": "computed"}

    def attach(self, target: Target, site: Site) -> Edit:
        """Quantize, or read the checkpoint, and exchange the layers in place; all or nothing."""
        state = _Attached(self, target)
        state.put_on()
        return Edit(
            self.name,
            state.take_off,
            stats=state.stats,
            no_undo=state.lost,
            displaced=state.displaced,
            weights=self.weights(target),
        )

    def weights(self, target: Target) -> frozenset[str]:
        """The denoisers, whose layers it exchanges."""
        return frozenset(name for name in target.spec.denoisers if getattr(target.pipe, name, None) is not None)


def _precision(source: Any) -> str | None:
    if isinstance(source, Checkpoint):
        return source.header.precision
    return None if source is None else source.precision()


def _dtype(target: Target) -> str:
    """The dtype of the main denoiser, without "torch."."""
    module = getattr(target.pipe, target.spec.denoisers[0], None)
    return str(getattr(module, "dtype", torch.bfloat16)).removeprefix("torch.")


def _held(target: Target, todo: list[Work]) -> str | None:
    """A layer that cannot be exchanged, and why."""
    for work in todo:
        other = HOLDERS.of(unwrap_module(work.module))
        if other is target.pipe:
            continue
        if other is not None:
            return f"{work.component} is shared with a pipeline that has quantized it already: restore that one first"
        for job in work.jobs:
            for name in job.names:
                why = refusal(work.module.get_submodule(name))
                if why is not None:
                    return f"{work.component}.{name}: {why}"
    return None


def _misfit(source: Any, todo: list[Work]) -> str | None:
    """Why a checkpoint of ours is not of these models."""
    if not isinstance(source, Checkpoint):
        return None
    for work in todo:
        listed = source.header.layers.get(work.component)
        kind, mine = source.header.classes.get(work.component), type(work.module).__name__
        if listed is None or kind != mine:
            return f"{source.path.name} is of {source.header.classes}, and {work.component} is a {mine}"
        for name, entry in listed.items():
            try:
                layer = work.module.get_submodule(name)
            except AttributeError:
                return f"{source.path.name} has a layer {work.component}.{name}, and the model has not"
            shape = [layer.out_features, layer.in_features]
            if shape != entry["shape"]:
                return f"{source.path.name}: {work.component}.{name} is {entry['shape']} there and {shape} here"
    return None


@dataclass
class _Layer:
    """One exchanged layer."""

    name: str
    linear: nn.Linear
    saved: Installed
    weight: nn.Parameter | None  # until it is put away
    kept: originals.Kept | None
    bytes: int


class _Attached:
    """The lever on one pipeline."""

    def __init__(self, lever: SvdQuant, target: Target) -> None:
        self.lever, self.target = lever, target
        self.done: dict[str, list[_Layer]] = {}
        self.originals: dict[str, Originals] = {}
        self.modules: list[nn.Module] = []
        self.undos: list[Callable[[], None]] = []

    def put_on(self) -> None:
        """Exchange the layers of every denoiser. Raises with nothing changed where that cannot be."""
        lever, target = self.lever, self.target
        verdict = lever.check(target)
        if not verdict.ok:
            raise verdict.error(f"{lever.name}: {verdict.reason}")
        source = lever.source()
        chosen = choose(lever.backend, _precision(source) or lever.precision, target.hardware, _dtype(target))
        assert isinstance(chosen, Chosen)
        todo = works(target.pipe, target.spec, lever.settings())
        dtypes = {p.dtype for work in todo for p in work.module.parameters()}
        settings = lever.settings(torch.float16 if torch.float16 in dtypes else torch.bfloat16)
        prompts = lever.calibration
        seen = calibrate(target.pipe, todo, settings, prompts, self._call()) if prompts else {}
        try:
            for work in todo:
                self.modules.append(unwrap_module(work.module))
                HOLDERS.take(self.modules[-1], target.pipe)
                names = [name for job in work.jobs for name in job.names]
                self.originals[work.component] = self._originals(work, names)
                for name, layer in _layers(source, work, target, settings, seen.get(work.component, {})):
                    self._exchange(work, name, layer, chosen)
                self.undos.append(refuse_plain_loads(self.modules[-1], names))
        except BaseException:
            self.take_off()
            raise
        for rows in self.done.values():
            for row in rows:
                row.weight = None

    def _call(self) -> dict[str, Any]:
        names = ("width", "height", "num_frames")
        return dict(zip(names, self.lever.calibration_size, strict=False))

    def _originals(self, work: Work, names: list[str]) -> Originals:
        mode, checkpoint = self.lever.keep_original, None
        if mode in (None, originals.SOURCE):
            checkpoint = Source.of(self.target.pipe, work.component)
        mode = mode or (originals.HOST if checkpoint is None else originals.SOURCE)
        return Originals(mode, checkpoint, users(work.module, names))

    def _exchange(self, work: Work, name: str, layer: Layer, chosen: Chosen) -> None:
        linear: Any = work.module.get_submodule(name)
        weight = linear.weight
        size = weight.numel() * weight.element_size()
        saved = install(linear, layer, chosen.backend, runner(chosen))
        row = _Layer(name, linear, saved, weight, None, size)
        self.done.setdefault(work.component, []).append(row)
        keep = self.originals[work.component]
        if keep.mode != originals.NO:  # else it goes when all layers are done: until then, undo must be possible
            row.kept, row.weight = keep.take(f"{name}.weight", weight), None

    def take_off(self) -> None:
        """Give every layer back what it had."""
        while self.undos:
            self.undos.pop()()
        for component, rows in self.done.items():
            for row in reversed(rows):
                weight = row.weight
                if isinstance(row.linear, SvdQuantLinear) and row.kept is not None:
                    weight = self.originals[component].put_back(row.kept, row.linear.proj_up.device)
                if weight is not None:
                    uninstall(row.linear, row.saved, weight)
            self.originals[component].close()
        for module in self.modules:
            HOLDERS.release(module)
        self.done.clear()
        self.modules.clear()

    def lost(self) -> str:
        """Why it cannot be undone, if so."""
        if any(row.kept is None for rows in self.done.values() for row in rows):
            return "keep_original='no' was asked for: load the pipeline anew"
        for component, rows in self.done.items():
            away = next((row.name for row in rows if taken_away(row.linear)), None)
            if away is not None:
                return f"the weight of {component}.{away} {ON_META}"
        copies = [copies_held(module) for module in self.modules]
        return "; ".join(filter(None, (*copies, *(one.lost() for one in self.originals.values()))))

    def displaced(self) -> str:
        """Which layers are others by now, in a clause."""
        rows = [(part, row) for part, rows in self.done.items() for row in rows]
        modules = {part: own_modules(getattr(self.target.pipe, part)) for part in self.done}
        gone = [
            f"{part}.{row.name}"
            for part, row in rows
            if not isinstance(row.linear, SvdQuantLinear) or modules[part].get(row.name) is not row.linear
        ]
        return replaced_in_words(gone, len(rows))

    def stats(self, run: Run) -> dict[str, Any]:
        """Layers, bytes before and now, and where the originals are."""
        rows = [row for rows in self.done.values() for row in rows]
        now = sum(b.numel() * b.element_size() for row in rows for b in row.linear.buffers())
        kept: dict[str, int] = {}
        for one in self.originals.values():
            for mode, count in one.counts().items():
                kept[mode] = kept.get(mode, 0) + count
        backend = rows[0].linear.svdq.backend if rows else ""  # type: ignore[union-attr]
        return {
            "layers": len(rows),
            "bytes": now,
            "bytes_before": sum(row.bytes for row in rows),
            "originals": kept,
            "backend": backend,
        }


def _layers(
    source: Any, work: Work, target: Target, settings: Settings, seen: Mapping[str, Any]
) -> Iterator[tuple[str, Layer]]:
    """The quantized layers of a denoiser, one after the other."""
    if isinstance(source, NunchakuFile):
        yield from source.layers(unwrap_module(work.module), target.spec)
    elif source is not None:
        yield from source.layers(work.component)
    else:
        for job in work.jobs:
            layers, _ = quantize_job(work.module, job, settings.recipe, seen.get(job.names[0]))
            yield from layers.items()
