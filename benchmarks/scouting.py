"""What seed scouting costs, counted: many seeds to an early step, a few of them to their end.

Image testbed, 16 seeds to step 6 of 28, 2 finished, under several plans. Counted are denoiser calls that were computed
(the testbed has one per step), by a hook on the denoiser's first block, which cached and replayed calls do not reach.
`share` is of as many whole runs under the same plan, `share_of_plain` of as many without a plan. Finished pictures
are compared bit by bit with whole runs under the same plan. Prints one JSON document (`--out FILE` writes it as
well); exits 1 where the plain plan's share is above 0.35, or a picture has other bits.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from diffaccel import accelerate, testbed
from diffaccel.scouting import scout

SEEDS, UNTIL, STEPS, CHOSEN = 16, 6, 28, (3, 11)
AIM = 0.35
PLANS: dict[str, dict[str, Any]] = {
    "nothing on": {},
    "adaptive cache": {"cache": "adaptive"},
    "first-block cache": {"cache": "first_block", "cache_threshold": 0.1},
}


def counted(pipe: Any) -> list[int]:
    """A list that grows with every computed call of the denoiser."""
    calls: list[int] = []
    last = pipe.transformer.single_transformer_blocks[-1].proj_out
    last.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def measure(plan: dict[str, Any], all_whole: bool = True) -> dict[str, Any]:
    """The counts under one plan. Without `all_whole` only the chosen seeds are run whole, and stand for the others (as
    good where no cache decides)."""
    pipe, prompt = testbed.load("image"), testbed.prompts("test", 1)[0]
    pipe.set_progress_bar_config(disable=True)
    accelerate(pipe, None, **plan)
    calls = counted(pipe)
    call = {"num_inference_steps": STEPS, **testbed.call_kwargs("image"), "output_type": "pt"}
    with scout(pipe, prompt, SEEDS, UNTIL, **call) as found:
        scouted, most = len(calls), found.bytes_held
        pictures = [output.images for output in found.finish(*CHOSEN)]
    ours = len(calls)
    calls.clear()
    seeds = range(SEEDS) if all_whole else CHOSEN
    wholes = {i: pipe(prompt, generator=torch.Generator().manual_seed(i), **call).images for i in seeds}
    equal = all(torch.equal(wholes[i], picture) for i, picture in zip(CHOSEN, pictures, strict=True))
    runs = len(calls) * SEEDS // len(wholes)
    return {
        "computed_scouting": scouted,
        "computed_finishing": ours - scouted,
        "computed_whole_runs": runs,
        "share": round(ours / runs, 4),
        "share_of_plain": round(ours / (SEEDS * STEPS), 4),
        "bytes_held_per_seed": most // SEEDS,
        "bit_equal": equal,
    }


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = {name: measure(plan) for name, plan in PLANS.items()}
    met = rows["nothing on"]["share"] <= AIM and all(row["bit_equal"] for row in rows.values())
    document = {"seeds": SEEDS, "until_step": UNTIL, "steps": STEPS, "finished": len(CHOSEN), "aim": AIM}
    text = json.dumps({**document, "aim_met": met, "plans": rows}, indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
