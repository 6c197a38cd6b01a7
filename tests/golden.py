"""Run golden cases: python tests/golden.py KIND FILE.json, with KIND caches, masks or ledger.

One line per case (`ok NAME` or `FAIL NAME why`), then `N of M cases hold`; exit 1 if any case fails. An unknown
kind, case kind or key is a failure, never a skip. `null` in `expected` is not compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":  # a script's own folder comes first, and its names (core, data) are not modules to import
    sys.path[0] = str(ROOT)

TOLERANCE = 1e-6


class Mismatch(Exception):
    """A case does not hold; the message says where."""


def compare(expected: Any, actual: Any, where: str) -> None:
    """Raise `Mismatch` unless `actual` is `expected`: numbers within 1e-6 if either is a float, all else exactly."""
    if expected is None:
        return
    if isinstance(expected, dict):
        if not isinstance(actual, dict):
            raise Mismatch(f"{where}: expected {sorted(expected)}, got {actual!r}")
        for key, value in expected.items():
            if key not in actual:
                raise Mismatch(f"{where}: unknown key {key!r}")
            compare(value, actual[key], f"{where}.{key}")
    elif isinstance(expected, list):
        if not isinstance(actual, (list, tuple)) or len(expected) != len(actual):
            raise Mismatch(f"{where}: expected {len(expected)} entries, got {_short(actual)}")
        for i, (value, got) in enumerate(zip(expected, actual, strict=True)):
            compare(value, got, f"{where}[{i}]")
    elif isinstance(expected, float) or isinstance(actual, float):
        number = isinstance(actual, (int, float)) and isinstance(expected, (int, float))
        if not number or not abs(expected - actual) <= TOLERANCE:
            raise Mismatch(f"{where}: expected {expected!r}, got {actual!r}")
    elif expected != actual:
        raise Mismatch(f"{where}: expected {expected!r}, got {actual!r}")


def _short(value: Any) -> str:
    text = repr(value)
    return (
        text if len(text) < 60 else f"{len(value)} entries" if isinstance(value, (list, tuple)) else text[:57] + "..."
    )


# ---- kinds: each yields (name, check), where check() raises what is wrong -------------------------------------------

Cases = Iterator[tuple[str, Callable[[], None]]]


def _known(data: dict[str, Any], allowed: set[str], where: str) -> None:
    unknown = sorted(set(data) - allowed)
    if unknown:
        raise Mismatch(f"unknown key {unknown[0]!r} in {where}")


def caches(data: dict[str, Any]) -> Cases:
    """Step caches; see tests/caching/golden_cases.py."""
    from tests.caching.golden_cases import check

    _known(data, {"_about", "cases"}, "the file")
    for name, case in data["cases"].items():
        yield name, lambda case=case: check(case)


def masks(data: dict[str, Any]) -> Cases:
    """Sparse attention masks; see tests/attention/golden_masks.py."""
    from tests.attention.golden_masks import check, check_width

    _known(data, {"about", "_about", "cases", "svg_width_frames"}, "the file")
    for case in data.get("cases", ()):
        yield case["name"], lambda case=case: check(case)
    for i, case in enumerate(data.get("svg_width_frames", ())):
        yield f"svg_width_frames_{i}", lambda case=case: check_width(case)


def ledger(data: dict[str, Any]) -> Cases:
    """The cost ledger; see tests/ledger/golden_ledger.py."""
    from tests.ledger.golden_ledger import cases

    _known(data, {"about", "_about", "definitions", "how", "models"}, "the file")
    yield from cases(data["models"])


KINDS: dict[str, Callable[[dict[str, Any]], Cases]] = {"caches": caches, "ledger": ledger, "masks": masks}


def run(kind: str, data: Any) -> list[tuple[str, str | None]]:
    """(name, None or why it fails) of every case; what is wrong with the file as a whole is a failing case "file"."""
    results: list[tuple[str, str | None]] = []
    try:
        if kind not in KINDS:
            raise Mismatch(f"unknown kind {kind!r}: it is one of {', '.join(KINDS)}")
        for name, check in KINDS[kind](data):
            try:
                check()
                results.append((name, None))
            except Exception as error:  # whatever a case raises is that case's failure
                results.append((name, _why(error)))
        if not results:
            raise Mismatch("no cases")
    except Exception as error:
        results.append(("file", _why(error)))
    return results


def _why(error: Exception) -> str:
    if isinstance(error, Mismatch):
        return str(error)
    text = f"missing key {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def main(arguments: list[str]) -> int:
    """The tool; returns its exit status."""
    if len(arguments) != 2:
        print(f"usage: python tests/golden.py {{{','.join(KINDS)}}} FILE.json", file=sys.stderr)
        return 2
    kind, path = arguments
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        results: list[tuple[str, str | None]] = [("file", _why(error))]
    else:
        results = run(kind, data)
    for name, why in results:
        print(f"ok {name}" if why is None else f"FAIL {name} {why}")
    good = sum(why is None for _, why in results)
    print(f"{good} of {len(results)} cases hold")
    return int(good < len(results))


if __name__ == "__main__":
    from tests import golden  # the module that the drivers import, not a second copy of it

    sys.exit(golden.main(sys.argv[1:]))
