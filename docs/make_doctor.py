"""Writes the table of faults into docs/doctor.md from the code: `python docs/make_doctor.py`."""

from __future__ import annotations

from pathlib import Path

from diffaccel.doctor.faults import FAULTS

PAGE = Path(__file__).parent / "doctor.md"
BEGIN, END = "<!-- faults -->\n", "<!-- end of faults -->"


def table() -> str:
    """One row per fault."""
    head = "| fault | what | signal | next step |\n|---|---|---|---|\n"
    rows = (f"| `{row.name}` | {row.title} | {row.signal} | {row.next_step} |\n" for row in FAULTS.values())
    return head + "".join(rows)


def page() -> str:
    """The page with the table of today."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
