"""Writes docs/loading.md: what each lever does with pipelines as people load them, from the rows in tests/loaded.

Run `python docs/make_loading.py`; a test keeps the file up to date, and `tests/loaded/test_cells.py` runs every cell.
Needs none of the libraries that quantize.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "loading.md"

INTRODUCTION = """\
# Pipelines as people load them

Made by `docs/make_loading.py` from the rows in `tests/loaded/`; `tests/loaded/test_cells.py` runs every cell on tiny
pipelines with a CPU (most of them in `make test-all`).

✓: the lever acts, two runs are alike, and after `restore` the picture, the class and the bits of every weight are
those from before. A letter: it does not act, and the sentence below is said, by the plan (`strict=True` raises it),
by the report of the run, or by the library itself, with diffaccel and without it. There is no third kind of cell.
LoRA: strengths are absolute, and unloading gives back the picture bit by bit. `save_pretrained`: an accelerated
pipeline writes the files that a plain one writes.
"""

FAMILIES = """\
## Families of modular pipelines

Every modular pipeline of diffusers, from its real blocks on tiny models (`tests/modular/`): beside its classic twin,
or its loop alone, from the noise to the last step (text encoders and decoders are left out). The schedule cache acts
in each, as in the classic twin, or equal to answers that are held by hand, in every branch, loop and expert; undone
to the last attribute. Caches that look at blocks act by a card, or once the blocks were learnt in a first run.

| pipeline | denoisers | branches of a step | block caches |
| --- | --- | --- | --- |
"""

NO_LOOP = """
The loop of `EchoModularPipeline` steps no scheduler: caches stand down there and say so, and a schedule of steps is
refused by name. FLUX.1 Kontext, Qwen-Image edits and image-to-video forms were given latents instead of pictures.
"""

NAMED = """\
## Not run

Models that AutoRound, SDNQ or Black Forest Labs' own format (bfl) have quantized are recognised by what diffusers
leaves on them, and our quantization is refused by their names; nothing else was tried. torchao's dynamic FP8,
nunchaku-lite's kernels and every transfer to a GPU need a GPU: not run on one.
"""

WHERE = {
    "plan": "",
    "run": " (in the run's report)",
    "warns": " (a warning before the next run, which goes on without it)",
    "raises": " (raised by the next run or change)",
    "library": " (the library's own error, with and without diffaccel)",
}


def page() -> str:
    """The whole page."""
    from tests.loaded.columns import COLUMNS
    from tests.loaded.rows import GROUPS

    letters: dict[tuple[str, str], str] = {}
    remarks: list[str] = []
    parts = [INTRODUCTION]
    for title, rows in GROUPS.items():
        lines = [["loaded by", *(column.title for column in COLUMNS)], ["---"] * (len(COLUMNS) + 1)]
        for row in rows:
            cells = [row.name]
            if row.remark:
                remarks.append(f"{row.name}: {row.remark}")
                cells = [f"{row.name} [{len(remarks)}](#remarks)"]
            for column in COLUMNS:
                says = row.cells.get(column.name)
                if says is None:
                    cells.append("✓")
                else:
                    letter = letters.setdefault((says.text, says.where), _letter(len(letters)))
                    cells.append(f"[{letter}](#sentences)")
            lines.append(cells)
        parts.append(f"## {title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n")
        if title == "Modular pipelines":
            parts.append(FAMILIES + "\n".join(_families()) + "\n" + NO_LOOP)
    if letters:
        said = (f"- {letter}: {text}{WHERE[where]}" for (text, where), letter in letters.items())
        parts.append("## Sentences\n\n" + "\n".join(said) + "\n")
    if remarks:
        numbered = (f"{number}. {remark}" for number, remark in enumerate(remarks, 1))
        parts.append("## Remarks\n\n" + "\n".join(numbered) + "\n")
    return "\n".join([*parts, NAMED])


def _families() -> list[str]:
    """A line for each modular pipeline."""
    from tests.modular.families import BY_BLOCKS_NOT, FAMILIES
    from tests.modular.pipelines import TWINS

    found = {twins.modular: (twins.denoisers, twins.branches, "as in its classic twin") for twins in TWINS.values()}
    for name, family in FAMILIES.items():
        found.setdefault(family.modular, (family.denoisers, family.branches, BY_BLOCKS_NOT.get(name, "✓")))
    return [
        f"| `{kind}` | {', '.join(denoisers)} | {', '.join(branches)} | {blocks} |"
        for kind, (denoisers, branches, blocks) in sorted(found.items())
    ]


def _letter(count: int) -> str:
    """a to z, then aa, ab, ..."""
    first, second = divmod(count, 26)
    return ("" if not first else chr(ord("a") + first - 1)) + chr(ord("a") + second)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    logging.disable(logging.WARNING)
    PAGE.write_text(page())
