"""Who uses a cache loads the rooms that a cache needs, and no other; a verb makes few calls. Counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = 96  # half of the 192 that were loaded once
CALLS = 14_700  # half of the 29 453 that a change of a threshold made once
SCRIPT = """
import sys
from tests import tiny
pipe = tiny.build("flux")
from diffaccel import accelerate, restore
accelerate(pipe, None, cache="first_block", {more})
tiny.run(pipe, "flux")
pipe.enable_first_block_cache(threshold=0.2)
restore(pipe)
ours = sorted(name for name in sys.modules if name.split(".")[0] == "diffaccel")
print(len(ours), *(name for name in ours if name.split(".")[1:2] in (["quantization"], ["offload"], ["vae"])))
"""


def loaded(more: str = "") -> list[str]:
    """The number of our modules, then those of the rooms of quantization, offload and VAE."""
    command = [sys.executable, "-c", SCRIPT.replace("{more}", more)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    return done.stdout.split()


def test_a_cache_loads_no_module_of_quantization_offload_or_vae() -> None:
    count, *strangers = loaded()
    assert strangers == [] and int(count) <= MODULES


def test_the_count_sees_them_where_they_are_asked_for() -> None:
    assert "diffaccel.offload.levers" in loaded('offload="layerwise", offload_store="disk"')


def test_a_change_of_a_threshold_makes_few_calls_of_ours() -> None:
    from benchmarks.house import verb_calls

    assert verb_calls() <= CALLS
