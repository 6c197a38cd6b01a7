"""What several verbs are given: a pipeline by folder or by the testbed's name, sizes, whole numbers, prompts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTBED = "testbed:"


def load_pipeline(model: str, size: tuple[int, ...] | None) -> tuple[Any, dict[str, Any]]:
    """The pipeline, and the arguments of a call besides prompt, steps and generator."""
    call: dict[str, Any] = {}
    if model.startswith(TESTBED):
        from .. import testbed

        kind = model.removeprefix(TESTBED)
        pipe: Any = testbed.load(kind)
        call = testbed.call_kwargs(kind)
    else:
        from .plan import _load as load_folder

        pipe = load_folder(Path(model))
    call |= dict(zip(("width", "height", "num_frames"), size or (), strict=False))
    pipe.set_progress_bar_config(disable=True)
    return pipe, call


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
