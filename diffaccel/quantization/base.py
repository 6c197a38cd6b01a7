"""What the levers FP8 and INT8 share: checks, attaching to every model of the pipeline, undo, guard and stats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from ..core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ..core.compat import unwrap_module
from ..core.options import BOOLEAN, choose_name, take, take_plain
from ..core.run import Run
from ..core.state import PerRun
from ..errors import IncompatibleError, InvalidOptionError, MissingDependencyError
from ..ledger.hardware import Hardware
from ..models.quantizers import quantized_by
from . import backends, guard, originals
from .backends import BACKENDS, NATIVE, Recipe
from .guard import Plain, Watch
from .originals import Checkpoint, Originals
from .others import HOLDERS, quantized_before
from .policy import Policy, Selection, select, select_encoder
from .swap import ON_META, Swapped, cast_in_graphs, foreign, held_of, on_meta, replaced_in_words, users
from .weights import DYNAMIC, ScaledWeight, gib_of, holds_scaled, tensor_bytes, weight_bytes

ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
_POLICY = [f.name for f in fields(Policy) if f.name not in ("convs", "multiple_of")]


@dataclass(frozen=True, kw_only=True)
class QuantizedWeights:
    """Base of the levers. Subclasses name the formats; these fields come after their own.

    Attributes:
        text_encoders: quantize the text encoders too.
        keep_original: where the original weights stay for undo: "source" (nowhere; read again from the checkpoint the
            model came from, hash verified), "disk", "host" (RAM) or "no" (undo is then refused). None is "source"
            where the checkpoint is on this machine, else "host".
        guard: "finite" checks the output of each run's first denoiser call, and names the layer where it is not
            finite; "reference" also compares it with the original weights' output (one more call per run); "off".
        first_blocks, last_blocks, last_text, ff_out, keep: see `quantization.policy.Policy`.
    """

    text_encoders: bool = False
    keep_original: str | None = None
    guard: str = guard.FINITE
    first_blocks: int = 0
    last_blocks: int = 0
    last_text: bool = False
    ff_out: bool = False
    keep: tuple[str, ...] = ()

    name: ClassVar[str]
    slot: ClassVar[Slot] = Slot.WEIGHT
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY

    if TYPE_CHECKING:  # fields of every subclass
        scheme: str
        backend: str

    def __post_init__(self) -> None:
        take_plain(self)
        take(self, BOOLEAN, "text_encoders")
        choose_name(self, "backend", BACKENDS)
        choose_name(self, "guard", guard.MODES)
        if self.keep_original is not None:
            choose_name(self, "keep_original", originals.MODES)
        if self.guard == guard.REFERENCE and self.keep_original in (originals.SOURCE, originals.DISK, originals.NO):
            raise InvalidOptionError(
                f"guard='reference' needs the originals at hand: keep_original='host', not {self.keep_original!r}"
            )
        object.__setattr__(self, "keep", self.policy().keep)
        why = backends.why_not(self.backend, self.scheme, self.recipe(None).rows)
        if why is not None:
            raise InvalidOptionError(f"backend={self.backend!r}, scheme={self.scheme!r}: {why}")

    # ---- for subclasses --------------------------------------------------------------------------------

    def recipe(self, hardware: Hardware | None) -> Recipe:
        """What weights become on a machine (None: as asked for)."""
        raise NotImplementedError

    def says(self, hardware: Hardware) -> str:
        """What the plan says about the arithmetic on a machine."""
        raise NotImplementedError

    # ---- the spine -------------------------------------------------------------------------------------

    def policy(self, recipe: Recipe | None = None, hardware: Hardware | None = None) -> Policy:
        """What stays in high precision, with what the scheme's kernels need on a machine."""
        options = {name: getattr(self, name) for name in _POLICY}
        if recipe is None or hardware is None:
            return Policy(**options)
        # CUDA's 8-bit products want these multiples in both directions; storing needs none and can take convolutions.
        multiple = 16 if recipe.scheme == DYNAMIC and hardware.kind == "cuda" else 1
        return Policy(**options, multiple_of=multiple, convs=recipe.scheme == "storage")

    def check(self, target: Target) -> Verdict:
        """Needs known blocks with plain weights that nobody else holds, and the backend's package and device."""
        recipe = self.recipe(target.hardware)
        if not (target.spec.stack or target.spec.unet):
            return Verdict.no(f"{target.spec.family}: {target.spec.no_stack}; no blocks to quantize")
        if not backends.installed(recipe.backend):
            return Verdict.no(
                f"backend={recipe.backend!r} is not installed: {backends.INSTALL[recipe.backend]}, or take "
                f"backend={NATIVE!r}",
                MissingDependencyError,
            )
        refusal = self._refused_by(recipe, target.hardware)
        if refusal is not None:
            return Verdict.refuse(refusal, IncompatibleError)
        theirs = held_of(target, ENCODERS if self.text_encoders else ())
        if theirs:
            return Verdict.refuse(theirs, IncompatibleError)
        parts = list(self._parts(target, recipe))
        before = quantized_before((component, module) for component, module, _ in parts)
        if before:
            return Verdict.refuse(before, IncompatibleError)
        if not any(selection.quantized for _, _, selection in parts):
            return Verdict.no(f"no layer is left to quantize: {parts[0][2].summary() if parts else 'no model'}")
        for component, module, selection in parts:
            verdict = self._refuses(target, component, module, selection, recipe)
            if verdict is not None:
                return verdict
        if self.keep_original == originals.SOURCE:
            for component, _, _ in parts:
                if Checkpoint.of(target.pipe, component) is None:
                    return Verdict.no(
                        f"keep_original='source': the checkpoint of {component} is not on this machine (no "
                        "safetensors at its _name_or_path); allowed then: 'disk', 'host', 'no'",
                        InvalidOptionError,
                    )
        summary = "; ".join(f"{component}: {selection.summary()}" for component, _, selection in parts)
        return Verdict.yes(f"{self.says(target.hardware)}; {summary}")

    def _refused_by(self, recipe: Recipe, hardware: Hardware) -> str | None:
        """A reason why this backend cannot do it on this machine."""
        return None

    def _refuses(
        self, target: Target, component: str, module: nn.Module, selection: Selection, recipe: Recipe
    ) -> Verdict | None:
        other = HOLDERS.of(module)
        if other is not None and other is not target.pipe:
            return Verdict.refuse(
                f"{component} is shared with a pipeline that has quantized it already: restore that one first, or "
                "leave its weights to it",
                IncompatibleError,
            )
        away = next((name for name in selection.quantized if on_meta(module, name)), None)
        if away is not None:
            return Verdict.refuse(f"{component}: the weight of {away} {ON_META}", IncompatibleError)
        found = foreign(module, selection.quantized) if other is None else None
        if found is None:
            return None
        name, kind = found
        weight = module.get_submodule(name)._parameters["weight"]
        same = (
            isinstance(weight, ScaledWeight) and weight.codes.dtype is recipe.kind and weight.scheme == recipe.scheme
        )
        if same:
            return Verdict.already(f"{component} was loaded like this already")
        return Verdict.refuse(
            f"{component}: the weights are quantized already ({name} holds {kind}): load the model in high precision",
            IncompatibleError,
        )

    def _parts(self, target: Target, recipe: Recipe) -> Iterator[tuple[str, nn.Module, Selection]]:
        """(attribute of the pipeline, model, its selection) of everything to quantize."""
        policy = self.policy(recipe, target.hardware)
        for component in target.spec.denoisers:
            module = getattr(target.pipe, component, None)
            if module is not None:
                plain = unwrap_module(module)
                yield component, plain, select(plain, target.spec, policy)
        for component in ENCODERS if self.text_encoders else ():
            module = getattr(target.pipe, component, None)
            if isinstance(module, nn.Module):
                yield component, module, select_encoder(module, Policy(multiple_of=policy.multiple_of))

    def bytes_after(self, target: Target) -> dict[str, int]:
        """Bytes of each model's weights once this is on: a byte per number of a quantized layer, a scale per row."""
        found = {}
        for component, module, selection in self._parts(target, self.recipe(target.hardware)):
            weights = [module.get_submodule(name)._parameters.get("weight") for name in selection.quantized]
            saved = sum(tensor_bytes(w) - w.numel() - 4 * w.shape[0] for w in weights if w is not None)
            found[component] = weight_bytes(module) - max(0, saved)  # quantized already: nothing is saved
        return found

    def predict(self, target: Target) -> Mapping[str, Any]:
        """GiB of the weights once this is on, and in how many bits the products are."""
        sizes = self.bytes_after(target)
        recipe, encoders = self.recipe(target.hardware), [name for name in sizes if name in ENCODERS]
        found: dict[str, Any] = {"denoiser_gib": gib_of(sizes[name] for name in sizes if name not in encoders)}
        if encoders:
            found["encoders_gib"] = gib_of(sizes[name] for name in encoders)
        return {**found, "product_bits": 8 if recipe.scheme == DYNAMIC else 16, "origin": "computed"}

    def attach(self, target: Target, site: Site) -> Edit:
        """Exchange the weights in place; all or nothing."""
        state = _Attached(self, target, site)
        state.put_on()
        return Edit(
            self.name,
            state.take_off,
            begin_run=state.begin_run,
            end_run=state.end_run,
            stats=state.stats,
            no_undo=state.lost,
            displaced=state.displaced,
            weights=frozenset(state.parts),
        )

    def weights(self, target: Target) -> frozenset[str]:
        """The models whose weights it changes."""
        return frozenset(component for component, _, _ in self._parts(target, self.recipe(target.hardware)))


def require_originals(pipe: Any) -> None:
    """Raise where `disable_quantization` has nothing to undo and the weights are quantized all the same."""
    if any(name.startswith("quantization.") for name in pipe.acceleration.plan.enabled):
        return
    for name, part in pipe.components.items():
        if holds_scaled(part) or (isinstance(part, nn.Module) and quantized_by(part)[0]):
            raise IncompatibleError(
                f"disable_quantization: {name} was loaded quantized (load_quantized, or a quantization_config): its "
                "original weights were never here. Load the pipeline from its checkpoint instead"
            )


class _Attached:
    """One lever on one pipeline."""

    def __init__(self, lever: QuantizedWeights, target: Target, site: Site) -> None:
        self.lever, self.target, self.site = lever, target, site
        self.parts: dict[str, Swapped] = {}
        self.watching: list[Callable[[], None]] = []  # what takes the watches of the run in progress off

    def put_on(self) -> None:
        """Quantize every model. Raises with nothing changed where that cannot be."""
        verdict = self.lever.check(self.target)
        if not verdict.ok:
            raise verdict.error(f"{self.lever.name}: {verdict.reason}")
        recipe = self.lever.recipe(self.target.hardware)
        try:
            for component, module, selection in self.lever._parts(self.target, recipe):
                keep = self._originals(component, module, selection)
                part = self.parts[component] = Swapped(module, keep)
                part.put_on(selection.quantized, recipe.convert)
                HOLDERS.take(module, self.target.pipe)
        except BaseException:
            self.take_off()
            raise

    def _originals(self, component: str, module: nn.Module, selection: Selection) -> Originals:
        mode, checkpoint = self.lever.keep_original, None
        if mode in (None, originals.SOURCE) and self.lever.guard != guard.REFERENCE:
            checkpoint = Checkpoint.of(self.target.pipe, component)
        if mode is None:
            mode = originals.HOST if checkpoint is None else originals.SOURCE
        return Originals(mode, checkpoint, users(module, selection.quantized))

    def take_off(self) -> None:
        """Give every model its own weights back."""
        for part in self.parts.values():
            part.take_off()
            HOLDERS.release(part.module)
        self.parts.clear()

    def lost(self) -> str:
        """Why it cannot be undone, if so."""
        return "; ".join(filter(None, (part.lost(name) for name, part in self.parts.items())))

    def displaced(self) -> str:
        """Which layers hold another weight by now, in a clause."""
        gone = [f"{name}.{layer}" for name, part in self.parts.items() for layer in part.replaced()]
        return replaced_in_words(gone, sum(len(part.swaps) for part in self.parts.values()))

    def begin_run(self, run: Run) -> None:
        """Watch the first call of each denoiser."""
        for name, swapped in self.parts.items():
            why = cast_in_graphs(swapped.module, swapped.layers)
            if why:
                raise IncompatibleError(f"{self.lever.name}: {name}: {why}")
        if self.lever.guard == guard.OFF:
            return
        for component, root in self.site.roots.items():
            part = self.parts.get(component)
            if part is not None:
                module = getattr(self.target.pipe, component)
                watch = Watch(self.lever.name, run, module, part.layers, self._plain(part))
                self.watching.append(root.add(watch, self.site.rank))

    def _plain(self, part: Swapped) -> Plain | None:
        if self.lever.guard != guard.REFERENCE:
            return None
        return Plain([(swap.layer, swap.quantized, swap.kept.parameter) for swap in part.swaps])

    def end_run(self, run: Run) -> None:
        """Look no more."""
        for stop in self.watching:
            stop()
        self.watching.clear()

    def stats(self, run: Run) -> dict[str, Any]:
        """Layers and bytes of the quantized weights, where the originals are, and what the guard compared."""
        before = sum(part.plain_bytes for part in self.parts.values())
        after = sum(part.quantized_bytes for part in self.parts.values())
        kept: dict[str, int] = {}
        for part in self.parts.values():
            for mode, count in part.originals.counts().items():
                kept[mode] = kept.get(mode, 0) + count
        found = {
            "layers": sum(len(part.swaps) for part in self.parts.values()),
            "bytes": after,
            "bytes_before": before,
        }
        return {**found, "originals": kept, **run.state.get(self.lever.name, PerRun())}
