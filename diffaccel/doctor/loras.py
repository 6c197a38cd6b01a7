"""Do LoRAs act, and as strongly as they should? Those of diffusers (peft) and those of `pipe.acceleration.loras`."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import DiffaccelError
from .diagnosis import Finding
from .patient import Patient

TOLERANCE = 1e-3  # of a factor, relative


def acting(patient: Patient) -> Iterator[Finding]:
    """An adapter that is on must change the picture."""
    ours = patient.first.pictures
    if ours is None:
        return
    theirs = dict(theirs_of(patient.pipe))
    for name in sorted({name for rows in theirs.values() for name in rows}):
        with muted([rows[name] for rows in theirs.values() if name in rows]):
            plain = patient.run().pictures
        if plain is not None and torch.equal(plain, ours):
            yield Finding("lora-no-effect", f"adapter {name}", "the picture is the same, bit by bit, without it")
    if patient.handle.has_loras and any(patient.handle.loras.strengths.values()):
        try:
            with patient.handle.without("lora"):
                plain = patient.run().pictures
        except DiffaccelError as why:
            patient.remarks.append(f"LoRAs were not compared with a run without them: {why}")
            return
        if plain is not None and torch.equal(plain, ours):
            names = ", ".join(patient.handle.loras.strengths)
            yield Finding("lora-no-effect", f"adapter {names}", "the picture is the same, bit by bit, without it")


Rows = list[tuple[str, Any]]  # (path of the layer, layer of peft that holds the adapter)


def theirs_of(pipe: Any) -> Iterator[tuple[str, dict[str, Rows]]]:
    """By component, active adapters of peft with their layers."""
    for component, part in pipe.components.items():
        found: dict[str, Rows] = {}
        for path, layer in part.named_modules() if isinstance(part, torch.nn.Module) else ():
            if (
                hasattr(layer, "lora_A")
                and hasattr(layer, "scaling")
                and not getattr(layer, "disable_adapters", False)
            ):
                for name in layer.active_adapters:
                    if name in layer.lora_A:
                        found.setdefault(name, []).append((f"{component}.{path}", layer))
        if found:
            yield component, found


@contextlib.contextmanager
def muted(parts: list[Rows]) -> Iterator[None]:
    """One adapter with the factor 0, for the length of the `with`."""
    layers = [layer for rows in parts for _, layer in rows]
    names = {id(layer): dict(layer.scaling) for layer in layers}
    adapters = [name for name in layers[0].scaling if all(name in layer.scaling for layer in layers)]
    try:
        for layer in layers:
            for name in adapters:
                layer.scaling[name] = 0.0
        yield
    finally:
        for layer in layers:
            layer.scaling.update(names[id(layer)])


def scales(patient: Patient) -> Iterator[Finding]:
    """Factors by layer, twins, and what the files say."""
    yield from _twins(patient)
    factors: dict[str, dict[str, float]] = {}
    for component, adapters in theirs_of(patient.pipe):
        configs = getattr(getattr(patient.pipe, component), "peft_config", {})
        for name, rows in adapters.items():
            config = configs.get(name)
            for path, layer in rows if config is not None else ():
                expected = nominal(config, path.partition(".")[2], layer.lora_A[name].weight.shape[0])
                factors.setdefault(name, {})[path] = layer.scaling[name] / expected if expected else math.nan
    for name, found in factors.items():
        low, high = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
        if abs(found[high] - found[low]) > TOLERANCE * max(abs(found[high]), 1e-9):
            evidence = f"times alpha/rank: {found[low]:.3g} at {low}, {found[high]:.3g} at {high}"
            yield Finding("lora-wrong-scale", f"adapter {name}", evidence)
    yield from _against_files(patient)


def nominal(config: Any, path: str, rank: int) -> float:
    """alpha / rank of a layer as peft's config has it (alpha / sqrt(rank) for rsLoRA)."""
    alpha = config.lora_alpha
    for pattern, value in (getattr(config, "alpha_pattern", None) or {}).items():
        if path == pattern or path.endswith(f".{pattern}"):
            alpha = value
    return float(alpha) / (math.sqrt(rank) if getattr(config, "use_rslora", False) else rank)


def _twins(patient: Patient) -> Iterator[Finding]:
    """Two adapters with the same weights on one layer: their strengths add up."""
    seen: dict[frozenset[str], str] = {}
    for _, adapters in theirs_of(patient.pipe):
        for one, other in itertools.combinations(sorted(adapters), 2):
            layers = {id(layer): layer for _, layer in adapters[one]}
            both = [layer for _, layer in adapters[other] if id(layer) in layers]
            if both and all(_same(layer.lora_B[one].weight, layer.lora_B[other].weight) for layer in both):
                seen[frozenset((one, other))] = f"{one} and {other} have the same weights: their strengths add up"
    ours = patient.handle.loras.adapters if patient.handle.has_loras else ()
    for a, b in itertools.combinations(ours, 2):
        keys = [(c, layer) for c, rows in a.weights.items() for layer in rows if layer in b.weights.get(c, {})]
        up = [(getattr(a.weights[c][n], "up", None), getattr(b.weights[c][n], "up", None)) for c, n in keys]
        if keys and all(_same(x, y) for x, y in up):
            seen[frozenset((a.name, b.name))] = f"{a.name} and {b.name} have the same weights: their strengths add up"
    for names, evidence in seen.items():
        yield Finding("lora-wrong-scale", f"adapters {', '.join(sorted(names))}", evidence)


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)


def _against_files(patient: Patient) -> Iterator[Finding]:
    """What lies on the layers against strength x alpha/rank x up @ down of the file."""
    from ..quantization.lora.files import read

    theirs = dict(theirs_of(patient.pipe))
    for name, source in patient.loras.items():
        weights = read(patient.pipe, source, None, None)
        wrong: dict[str, float] = {}
        for component, rows in theirs.items():
            for path, layer in rows.get(name, ()):
                pair = weights.get(component, {}).get(path.partition(".")[2])
                if pair is not None and hasattr(pair, "delta"):
                    wrong[path] = _ratio(layer, name, pair.delta(1.0))
        odd = {path: ratio for path, ratio in wrong.items() if abs(ratio - 1) > 0.01}
        if odd:
            path, ratio = next(iter(odd.items()))
            evidence = (
                f"{len(odd)} of {len(wrong)} layers are not as in the file at strength 1: {ratio:.3g} x at {path}"
            )
            yield Finding("lora-wrong-scale", f"adapter {name}", evidence)
        elif not wrong:
            patient.remarks.append(f"adapter {name}: no layer of peft holds it, so its file was not compared")


def _ratio(layer: Any, name: str, truth: torch.Tensor) -> float:
    """By which factor the adapter on a layer is the file's (least squares)."""
    up, down = layer.lora_B[name].weight, layer.lora_A[name].weight
    live = (up.float().flatten(1) @ down.float().flatten(1)) * layer.scaling[name]
    return float((live * truth).sum() / truth.square().sum().clamp(min=1e-30))
