"""`diffaccel ledger`: what a generation costs, by arithmetic on configs; loads neither torch nor weights."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import InvalidOptionError, unknown
from ..ledger import comparison, ledger_text
from ..ledger.arithmetic import estimate
from ..ledger.exchange.stack import Stack
from ..ledger.exchange.stack_text import waterfall
from ..ledger.hardware import HARDWARE, Hardware, named, with_prices
from ..ledger.memory import need, strips_peak_bytes
from ..ledger.models import names, resolve
from ..ledger.timing import EXECUTIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a bundled model or a folder of configs; without it, list them")
    add("--size", metavar="WxH[xF]", help="pixels, and frames of a clip (the model's usual size)")
    add("--steps", type=int, metavar="N", help="steps of the sampler (the model's default)")
    add("--guidance", type=float, metavar="SCALE", help="guidance scale; 1 or below: one branch (the model's default)")
    add("--text-tokens", metavar="N[,N]", help="length of the prompt, by stream (the model's default)")
    add("--hardware", metavar="NAME", help=f"seconds on this machine: {', '.join(HARDWARE)}")
    add("--probe", action="store_true", help="with --hardware cpu: measure this processor for 5 s first")
    add("--execution", default="eager", choices=EXECUTIONS, help="how the denoiser runs (eager)")
    add("--mfu", type=float, metavar="PART", help="part of the peak that is reached, in place of the fitted one")
    add("--assume-free-gib", type=float, metavar="GIB", help="memory that is free, on a card that others share")
    add("--prices", metavar="FILE.toml", help="dollars an hour by machine, in place of the bundled ones")
    add("--sweep", choices=comparison.SWEEPS, help="how the cost grows with this")
    add("--with", dest="items", metavar="ITEM[,ITEM]", help="what these do in turn: compile,attention.sage,...")
    add("--png", type=Path, metavar="FILE", help="draw the sweep, the items (--with), or what multiplies the cost")
    add("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    if args.model is None:
        print(json.dumps({"models": list(names())}, indent=2) if args.json else "\n".join(names()))
        return 0
    model = resolve(args.model)
    width, height, frames = _size(args.size)
    machine = _machine(args)
    if args.png is not None and args.png.suffix.lower() != ".png":
        raise InvalidOptionError(f"--png: the file must end in .png, got {args.png}")
    asked = (height, width, frames, args.steps, args.guidance, _lengths(args.text_tokens))
    ledger = estimate(model, *asked, machine, args.mfu, args.execution)
    steps = []
    if args.sweep:
        steps = comparison.sweep(model, ledger, args.sweep, machine, args.mfu, args.execution)
    factors = comparison.amplifiers(model, ledger)
    stack = ledger.apply(_items(args.items), machine) if args.items is not None else None
    if args.png is not None and stack is not None:
        draw_stack(args.png, stack)
    elif args.png is not None:
        _draw(args.png, ledger.model, steps, args.sweep, factors)
    if args.json:
        data = ledger.to_dict() | {"need_gib": need(ledger).to_dict(), "amplifiers": dict(factors)}
        data["strips_peak_bytes"] = strips_peak_bytes(model, ledger)
        if steps:
            data["sweep"] = [{"at": step.label, **step.ledger.to_dict()} for step in steps]
        if stack is not None:
            data["stack"] = stack.to_dict()
        print(json.dumps(data, indent=2, allow_nan=False))
        return 0
    print(ledger_text.page(ledger, machine, args.assume_free_gib, strips_peak_bytes(model, ledger)))
    if stack is not None:
        print("\n" + waterfall(stack))
    else:
        print(ledger_text.sweep_table(steps) if steps else ledger_text.amplifier_table(factors))
    return 0


def _items(text: str) -> list[str]:
    """Names of plan items, of which each place has one."""
    from ..ledger.exchange.levers import ITEMS

    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InvalidOptionError(f"--with must name plan items, such as compile,cache.adaptive, got {text!r}")
    for name in names:
        if name not in ITEMS:
            raise unknown("plan item", name, ITEMS)
    places = [name.partition(".")[0] for name in names]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        raise InvalidOptionError(f"--with {text}: only one item can hold the place {twice!r}")
    return names


def draw_stack(path: Path, stack: Stack) -> None:
    """The waterfall as a picture."""
    from .drawing import falls

    unit, scale = ("seconds", 1.0) if stack.unit == "s" else ("PFLOPs", 1e15)
    rows = [("all in bf16", stack.first.total), *((row.name, row.after) for row in stack.rows)]
    where = f" on {stack.hardware}" if stack.hardware else ""
    falls([(name, value / scale) for name, value in rows], f"{stack.model}{where}: {unit}, computed").save(path)


def _machine(args: argparse.Namespace) -> Hardware | None:
    if args.assume_free_gib is not None and not 0 < args.assume_free_gib < float("inf"):
        raise InvalidOptionError(f"--assume-free-gib must be a number above 0, got {args.assume_free_gib:g}")
    if args.hardware is None:
        if args.prices:
            raise InvalidOptionError("--prices wants --hardware: the machine that has a price")
        if args.probe:
            raise InvalidOptionError("--probe wants --hardware cpu")
        if args.assume_free_gib is not None:
            raise InvalidOptionError("--assume-free-gib wants --hardware: the machine that is shared")
        return None
    machine = named(args.hardware)
    if args.probe:
        if machine.kind != "cpu":
            raise InvalidOptionError(f"--probe is for --hardware cpu: {machine.name} is in the table")
        from ..ledger.probe import probe  # brings torch along

        return probe()
    return with_prices(args.prices)[machine.name] if args.prices else machine


def _size(text: str | None) -> tuple[int | None, int | None, int | None]:
    """(width, height, frames)."""
    if text is None:
        return None, None, None
    found = re.fullmatch(r"(\d+)x(\d+)(?:x(\d+))?", text.lower())
    if found is None:
        raise InvalidOptionError(f"--size must be WxH or WxHxF, such as 1024x1024 or 1280x720x81, got {text!r}")
    width, height, frames = found.groups()
    return int(width), int(height), None if frames is None else int(frames)


def _lengths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise InvalidOptionError(f"--text-tokens must be numbers such as 512 or 1000,256,729, got {text!r}")
    return tuple(map(int, text.split(",")))


def _draw(
    path: Path,
    model: str,
    steps: Sequence[comparison.Step],
    over: str | None,
    factors: Sequence[tuple[str, float]],
) -> None:
    from .drawing import bars

    if steps:
        rows = [(step.label, step.ledger.flops.denoise / 1e15) for step in steps]
        bars(rows, f"{model}: PFLOPs of denoising by {over}").save(path)
    else:
        bars(factors, f"{model}: twice as much multiplies the denoiser's FLOPs by").save(path)
