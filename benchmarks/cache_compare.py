"""Who is better, and is it certain: paired bootstrap over prompts, the comparison block, a table and the curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CAPS = {28: (14, 9), 50: (25, 16)}  # at most so many computed steps
AIMS_DB = {"peer": 3.0, "baseline": 2.0}
SLACK = 1.02  # of a cap: embedders and the last layer, which a peer's lite mode still runs, are no full forward
RESAMPLES = 10_000
REFERENCES = ("plain", "fine")  # the plain run of as many steps, and the one of 112

Row = Mapping[str, Any]


def bootstrap(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Mean difference in dB over the same prompts, with the 95 % interval of a paired bootstrap."""
    difference = np.asarray(ours) - np.asarray(theirs)
    picks = np.random.default_rng(seed).integers(0, len(difference), (RESAMPLES, len(difference)))
    low, high = np.percentile(difference[picks].mean(axis=1), [2.5, 97.5])
    return {
        "difference_db": round(float(difference.mean()), 2),
        "interval_95_db": [round(float(low), 2), round(float(high), 2)],
        "worst_prompt_db": round(float(difference.min()), 2),
    }


def best(rows: Sequence[Row], cap: float, cost: str, reference: str) -> Row | None:
    """The row of the highest mean PSNR that costs at most `cap` (and a little)."""
    cheap = [
        row
        for row in rows
        if row["status"] == "ok" and row[cost] <= cap * (SLACK if cost == "equivalent" else 1) + 1e-6
    ]
    return max(cheap, key=lambda row: row[reference]["psnr_db"], default=None)


def compare(rows: Sequence[Row], steps: int) -> list[dict[str, Any]]:
    """Per cap, cost measure and reference: our best against the best peer and every baseline.

    cost "computed" counts full-stack forwards as the aim does; "equivalent" counts all work, so what a reused
    step still runs is in it. Settings are chosen on the prompts they are judged by, ours and theirs alike.
    """
    blocks = []
    for cap in CAPS.get(steps, (steps // 2, steps // 3)):
        for cost in ("computed", "equivalent"):
            for reference in REFERENCES:
                blocks.append(_block(rows, cap, cost, reference))
    return blocks


def _block(rows: Sequence[Row], cap: int, cost: str, reference: str) -> dict[str, Any]:
    ours = best([r for r in rows if r["group"] == "ours"], cap, cost, reference)
    block: dict[str, Any] = {"at_most": cap, "cost": cost, "reference": reference, "ours": _brief(ours, reference)}
    peers = [r for r in rows if r["group"] == "peer"]
    rivals = {"peer": [r for r in peers if not r["our_schedule"]]}
    for library in sorted({r["library"] for r in peers}):
        rivals[f"peer {library}"] = [r for r in peers if r["library"] == library and not r["our_schedule"]]
    rivals["peer with our schedule"] = [r for r in peers if r["our_schedule"]]
    for solver in sorted({r["method"] for r in rows if r["group"] == "baseline"}):
        rivals[f"baseline {solver}"] = [r for r in rows if r["group"] == "baseline" and r["method"] == solver]
    block["against"] = {}
    for name, candidates in rivals.items():
        rival = best(candidates, cap, cost, reference)
        entry = _brief(rival, reference)
        if ours is not None and rival is not None:
            entry |= bootstrap(ours[reference]["psnr_each_db"], rival[reference]["psnr_each_db"])
            aim = AIMS_DB.get(name.split()[0]) if name in ("peer",) or name.startswith("baseline") else None
            if aim is not None:
                entry["aim_db"] = aim
                entry["aim_met"] = entry["difference_db"] >= aim and entry["interval_95_db"][0] > 0
        block["against"][name] = entry
    return block


def _brief(row: Row | None, reference: str) -> dict[str, Any]:
    if row is None:
        return {"name": None}
    return {
        "name": row["name"],
        "computed": row["computed"],
        "equivalent": row["equivalent"],
        "psnr_db": row[reference]["psnr_db"],
        "psnr_lowest_db": row[reference]["psnr_lowest_db"],
    }


# ---- for the eye ---------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """A compact table, best first within each group."""
    heads = ("fwd", "equiv", "dB", "lowest", "dB/112", "ssim", "score", "wall")
    lines = [f"{'setting':44} " + " ".join(f"{h:>{w}}" for h, w in zip(heads, (6, 6, 7, 6, 7, 7, 6, 6), strict=True))]
    for group in ("ours", "peer", "baseline", "noise"):
        own = [row for row in rows if row["group"] == group]
        own.sort(key=lambda row: row["computed"] if row["status"] == "ok" else 1e9)
        for row in own:
            if row["status"] != "ok":
                lines.append(f"{row['name']:44} {row['status']}: {row['reason'][:90]}")
                continue
            wall = row.get("time", {}).get("wall_ratio")
            plain, fine = row["plain"], row["fine"]
            lines.append(
                f"{row['name']:44} {row['computed']:6.2f} {row['equivalent']:6.2f} {plain['psnr_db']:7.2f} "
                f"{plain['psnr_lowest_db']:6.2f} {fine['psnr_db']:7.2f} {plain['ssim']:7.4f} {row['score']:6.3f} "
                f"{'' if wall is None else format(wall, '6.3f')}"
            )
    return "\n".join(lines)


def verdicts(blocks: Sequence[Mapping[str, Any]]) -> str:
    """One line per aim: by how much our best is ahead, and whether the aim is met or missed."""
    lines = []
    for block in blocks:
        for entry in block["against"].values():
            if "aim_db" in entry:
                met = "met" if entry["aim_met"] else "MISSED"
                lines.append(
                    f"at most {block['at_most']:2} ({block['cost']}), to the {block['reference']} run: "
                    f"{entry['difference_db']:+.1f} dB over {entry['name']}, aim {entry['aim_db']:g} dB {met}"
                )
    return "\n".join(lines)


def draw(rows: Sequence[Row], title: str, path: Path) -> str | None:
    """The curves as PNG (lines join the best at each cost); None if drawn, else why not."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "matplotlib is not installed: pip install 'diffaccel[bench]'"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(15, 11), squeeze=False)
    names = {"plain": "to the plain run of as many steps", "fine": "to the plain run of 112 steps"}
    costs = {"computed": "full-stack forwards", "equivalent": "all work, in forwards"}
    styles = {"ours": ("-", "o"), "peer": ("--", "s"), "baseline": (":", "x")}
    for across, (cost, cost_name) in enumerate(costs.items()):
        for down, (reference, reference_name) in enumerate(names.items()):
            axis = axes[down][across]
            for group, method in dict.fromkeys((r["group"], r["method"]) for r in rows if r["group"] in styles):
                own = [r for r in rows if (r["group"], r["method"]) == (group, method) and r["status"] == "ok"]
                own.sort(key=lambda r: r[cost])
                line, marker = styles[group]
                label = method if group == "ours" else f"{group}: {method}"
                values = [r[reference]["psnr_db"] for r in own]
                costs_of = [r[cost] for r in own]
                top = {
                    round(c): max(p for p in zip(values, costs_of, strict=True) if round(p[1]) == round(c))
                    for c in costs_of
                }
                best_values, best_costs = zip(*top.values(), strict=True) if top else ((), ())
                [drawn] = axis.plot(
                    best_costs, best_values, line, marker=marker, markersize=4, linewidth=1, label=label
                )
                axis.plot(costs_of, values, marker, markersize=4, color=drawn.get_color())
            axis.set(xlabel=f"{cost_name} per branch and run", ylabel=f"PSNR in dB {reference_name}")
            axis.grid(alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.suptitle(title)
    figure.legend(handles, labels, loc="lower center", ncols=6, fontsize=8)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return None
