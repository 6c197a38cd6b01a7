"""What decoding or encoding in strips holds in memory and takes in work, before it is done.

One plain run under fake tensors, over three latent frames where they are taken one by one, gives bytes and
multiply-adds between the places where it may be cut. The rest is arithmetic: both grow with the height of a strip, and
both repeat from the third frame on.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...core.compat import fake_tensors, vae_decode, vae_encode
from ..layout import compression, compression_of_time
from ..tiles import strips, with_halo
from .causal_cuts import gates, reached, weights_of
from .live_bytes import LiveBytes
from .replace_input import ReplaceInput, Untouched

SHORT = 3  # latent frames of a measuring run
MARGIN = 1.01  # for what the stubs take
SAVING = 0.75  # of the peak of a plain decode: what `fast` must stay below to be worth its time


@dataclass(frozen=True)
class Cost:
    """Bytes and multiply-adds (of convolutions) at one shape, with strips taken as high as the whole map."""

    stored: int  # bytes of the maps at the cut, all frames
    result: int  # bytes of the picture, or of the latents
    whole: int  # peak bytes of the part that sees the whole map; `stored` is in it
    strip: int  # peak bytes of the part in strips; `stored` is not in it
    whole_work: float
    strip_work: float


@dataclass(frozen=True)
class Choice:
    """How to go about it: the cut (an index into `gates`; None: none) and the axis (-2 rows, -1 columns)."""

    cut: int | None
    axis: int
    spans: tuple[tuple[int, int], ...]  # latent lines of each strip, [first, end)
    peak_bytes: int
    work: float


class _Watch(LiveBytes):
    """Live bytes, and multiply-adds of convolutions, between the points that a run passes."""

    def __init__(self) -> None:
        super().__init__()
        self.work = 0
        self.points: list[_Point] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.convolution.default:
            self.work += output.numel() * (args[1].numel() // args[1].shape[0])
        return output

    def pass_by(self, map_bytes: int) -> None:
        """A point is reached; what follows counts towards the next one."""
        self.points.append(_Point(self.now_bytes, self.peak_bytes, self.work, map_bytes))
        self.peak_bytes, self.work = self.now_bytes, 0


@dataclass(frozen=True)
class _Point:
    """Bytes now, most bytes and work since the point before, bytes of the map that goes by."""

    now: int
    peak: int
    work: int
    map: int


class _NoMatrix(TorchFunctionMode):
    """Attention on meta allocates what a kernel does: by itself, PyTorch would make a matrix of all pairs there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:
            q, k, v = (*args, *(given[name] for name in ("query", "key", "value")[len(args) :]))[:3]
            if q.device.type == "meta":
                return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]
        return func(*args, **given)


@dataclass(frozen=True)
class _Run:
    """A measuring run: the points of each call of the coder (its entry, then each gate), and the end."""

    calls: list[list[_Point]]
    end: _Point
    result_bytes: int
    frames: int  # of the result
    latents: int  # latent frames that went through
    frames_in: int  # frames of z, or of x when encoding

    def results(self, latents: int) -> float:
        """Bytes of the result of so many latent frames (the first may make fewer frames than the others)."""
        more = (self.frames - 1) / (self.latents - 1) if self.latents > 1 else 0
        return self.result_bytes / self.frames * (1 + (latents - 1) * more) if latents else 0

    @property
    def one_by_one(self) -> bool:
        """Did latent frames go through one at a time, and enough of them to see a frame repeat the one before it?"""
        return len(self.calls) == self.latents == SHORT

    def behind(self, call: int, gate: int) -> list[_Point]:
        """The points that a call passes behind a gate, up to where the next call enters."""
        last = self.calls[call + 1][0] if call + 1 < len(self.calls) else self.end
        return [*self.calls[call][gate + 1 :], last]


def _measure(vae: Any, shape: tuple[int, ...], encode: bool, more: Mapping[str, Any]) -> _Run:
    """A plain run over x or z of `shape`, under fake tensors."""
    dtype, device = weights_of(vae)
    watch = _Watch()
    marks: list[int] = []  # how many points had been passed when each call entered

    def pass_by(call: int, x: torch.Tensor) -> torch.Tensor:
        watch.pass_by(x.numel() * x.element_size())
        return x

    def enter(call: int, x: torch.Tensor) -> torch.Tensor:
        marks.append(len(watch.points))
        return pass_by(call, x)

    with torch.no_grad(), Untouched(vae), fake_tensors(), _NoMatrix(), ExitStack() as stack:
        x = torch.empty(shape, dtype=dtype, device=device)
        stack.enter_context(ReplaceInput(vae.encoder if encode else vae.decoder, enter))
        for gate in gates(vae, encode):
            stack.enter_context(ReplaceInput(gate, pass_by))
        stack.enter_context(watch)
        result = vae_encode(vae, x) if encode else vae_decode(vae, x, **more)
        watch.pass_by(0)
    bounds = [*marks, len(watch.points) - 1]
    calls = [watch.points[a:b] for a, b in pairwise(bounds)]
    size = result.numel() * result.element_size()
    return _Run(calls, watch.points[-1], size, result.shape[2], _latents(vae, shape, encode), shape[2])


def _latents(vae: Any, shape: tuple[int, ...], encode: bool) -> int:
    return 1 + (shape[2] - 1) // compression_of_time(vae) if encode else shape[2]


def _plain(run: _Run, latents: int, frames: int) -> Cost:
    """The cost of no cut."""
    start, result = run.calls[0][0].now, run.results(latents)
    if run.latents == latents:
        points = [point for call in run.calls for point in call] + [run.end]
        return Cost(0, round(result), max(p.peak for p in points), 0, sum(p.work for p in points), 0)
    last = len(run.calls) - 1
    done = run.results(run.latents - 1)
    peak = max(point.peak for point in run.behind(last, 0)) - start - done
    caches = run.calls[last][0].now - start - done
    most = start * frames / run.frames_in + max(peak + run.results(latents - 1), caches + 2 * result)
    return Cost(0, round(result), round(most), 0, latents * sum(point.work for point in run.behind(last, 0)), 0)


def _of_gate(run: _Run, gate: int, latents: int, frames: int, encode: bool) -> Cost:
    """The cost of a cut: a plain run's bytes, less what is not there at the time when its two parts run one by one."""
    at = gate + 1  # its place among the points of a call
    last, start = len(run.calls) - 1, run.calls[0][0].now
    maps = [call[at].map for call in run.calls]
    before: float
    behind: float
    if not run.one_by_one:
        stored = sum(maps)
        before = max(max(p.peak for p in call[1 : at + 1]) - call[0].now for call in run.calls) + start
        behind = max(
            max(p.peak for p in run.behind(i, at)) - (call[at].now - call[at].map - call[0].now)
            for i, call in enumerate(run.calls)
        )
        works = [sum(p.work for p in call[1 : at + 1]) for call in run.calls]
        works_behind = [sum(p.work for p in run.behind(i, at)) for i in range(len(run.calls))]
        before_work, behind_work = float(sum(works)), float(sum(works_behind))
    else:
        stored = maps[0] + maps[-1] * (latents - 1)
        first, second, third = run.calls[:3]
        one, two = run.results(1), run.results(2)
        # caches of one frame behind the gate, then (they grow to two frames) those before it, then those behind it
        behind_one = second[0].now - start - one - (first[at].now - start - first[at].map)
        caches_before = second[at].now - start - second[at].map - one - behind_one
        caches_behind = third[0].now - start - two - caches_before
        grown = start * frames / run.frames_in
        before = max(p.peak for p in third[1 : at + 1]) - start - two - caches_behind + grown
        peak = max(p.peak for p in run.behind(last, at)) - start - two - caches_before
        behind = max(peak + run.results(latents - 1), caches_behind + 2 * run.results(latents))
        before_work = float(latents * sum(p.work for p in third[1 : at + 1]))
        behind_work = float(latents * sum(p.work for p in run.behind(last, at)))
    result = round(run.results(latents))
    if encode:
        return Cost(stored, result, round(stored + behind), round(before), behind_work, before_work)
    return Cost(stored, result, round(stored - maps[-1] + before), round(behind), before_work, behind_work)


_COSTS: weakref.WeakKeyDictionary[Any, dict[Any, list[Cost]]] = weakref.WeakKeyDictionary()


def costs(vae: Any, shape: tuple[int, ...], encode: bool, more: Mapping[str, Any]) -> list[Cost]:
    """The cost of no cut, and then that of each of `gates`, for z (encoding: x) of `shape`."""
    table = _COSTS.setdefault(vae, {})
    key = (shape, encode, weights_of(vae))
    if key not in table:
        latents = _latents(vae, shape, encode)
        run = None
        if latents > 1:
            span = compression_of_time(vae) if encode else 1
            run = _measure(vae, (*shape[:2], 1 + (SHORT - 1) * span, *shape[3:]), encode, more)
        if run is None or not run.one_by_one:
            run = _measure(vae, shape, encode, more)
        table[key] = [_plain(run, latents, shape[2])]
        table[key] += [_of_gate(run, gate, latents, shape[2], encode) for gate in range(len(gates(vae, encode)))]
    return table[key]


def choose_cut(
    vae: Any, shape: tuple[int, ...], rows: int, mode: str, itemsize: int, encode: bool, more: Mapping[str, Any]
) -> Choice:
    """The cut for strips of at most `rows` latent lines along the longer side of `shape` ([B, C, T, H, W]).

    `low` takes the cut with the least peak; `fast` the one with the least work among those that stay below `SAVING` of
    a plain run, else as `low`. Where no cut saves anything, none is made. `peak_bytes` is the most that any strip
    height up to `rows` takes, so that lower strips never promise more.
    """
    chosen = [_at_height(vae, shape, lines, mode, encode, more) for lines in range(1, rows + 1)]
    most = max(choice.peak_bytes for choice in chosen)
    last = chosen[-1]
    own = weights_of(vae)[0].itemsize
    return Choice(last.cut, last.axis, last.spans, round(most * MARGIN) * itemsize // own, last.work)


def _at_height(
    vae: Any, shape: tuple[int, ...], rows: int, mode: str, encode: bool, more: Mapping[str, Any]
) -> Choice:
    axis = -2 if shape[-2] >= shape[-1] else -1
    height = shape[axis] // (compression(vae) if encode else 1)
    plain, *rest = costs(vae, shape, encode, more)
    whole = Choice(None, axis, ((0, height),), plain.whole, plain.whole_work)
    spans = tuple(strips(height, rows))
    if len(spans) == 1:
        return whole
    found = [whole]
    for cut, one in enumerate(rest):
        reach = reached(vae, cut, encode, more)
        full = height * reach.scale
        tall = [with_halo((a * reach.scale, b * reach.scale), reach.halo[axis], full) for a, b in spans]
        most, total = max(b - a for a, b in tall) / full, sum(b - a for a, b in tall) / full
        peak = max(one.whole, one.stored + (0 if encode else one.result) + round(one.strip * most))
        found.append(Choice(cut, axis, spans, peak, one.whole_work + one.strip_work * total))
    low = min(found, key=lambda choice: choice.peak_bytes)
    if mode == "low":
        return low
    saving = [choice for choice in found if choice.peak_bytes <= SAVING * plain.whole]
    return min(saving, key=lambda choice: choice.work, default=low)
