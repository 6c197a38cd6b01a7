"""What several verbs are given: a pipeline by folder, file or testbed, sizes, numbers, call arguments, prompts."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..bench.sources import Source

TESTBED = "testbed:"


def load_pipeline(model: str, size: tuple[int, ...] | None) -> tuple[Any, dict[str, Any]]:
    """The pipeline, and the arguments of a call besides prompt, steps and generator."""
    source = load_source(model)
    return source.pipe, source.call | dict(zip(("width", "height", "num_frames"), size or (), strict=False))


def load_source(model: str) -> Source:
    """The pipeline of a testbed, a folder or a Python file, with what goes with it."""
    from ..bench.sources import load

    return load(model)


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def number(text: str) -> float:
    """Parses a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return value


def pair(text: str) -> tuple[str, Any]:
    """Parses NAME=VALUE; the value as JSON where it is some, else as text."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def whole(least: int) -> Callable[[str], int]:
    """Parses a whole number of at least `least`."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return parse


def size(text: str) -> tuple[int, ...]:
    """Parses WxH or WxHxF."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(x[1-9]\d*)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form WxH or WxHxF")
    return tuple(int(part) for part in text.split("x"))


def prompts_of(given: str | None, option: str, model: str, split: str) -> list[str]:
    """Prompts from a file, one a line; a number means so many of the testbed's. None: none."""
    from ..errors import InvalidOptionError

    if given is None:
        return []
    if given.isascii() and given.isdigit():
        if not model.startswith(TESTBED):
            raise InvalidOptionError(
                f"{option} {given}: a number is for {TESTBED}KIND; give a file, one prompt a line"
            )
        from .. import testbed

        return testbed.prompts(split, int(given), kind=model.removeprefix(TESTBED))
    lines = [line.strip() for line in Path(given).read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if line]
    if not found:
        raise InvalidOptionError(f"{option} {given}: no prompt in it (one a line)")
    return found
