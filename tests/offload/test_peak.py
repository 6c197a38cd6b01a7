"""Predicted peaks: by hand, for published models, and against the memory of a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diffaccel.errors import BudgetError
from diffaccel.offload.stage.peak import (
    CHUNK_BYTES,
    GIB,
    Component,
    Placement,
    choose_placement,
    predict_peak,
    total_bytes,
)

CLIP, T5, DIT, VAE = 3, 20, 50, 2
FLUX = (
    Component("text_encoder", "encode", CLIP),
    Component("text_encoder_2", "encode", T5),
    Component("transformer", "denoise", DIT, True),
    Component("vae", "decode", VAE),
)
EXPERTS = (
    Component("text_encoder", "encode", 10),
    Component("transformer", "denoise", 30, True),
    Component("transformer_2", "denoise", 40, True),
    Component("vae", "decode", 1),
)


def moments(*components: Component, **how: Any) -> tuple[int, int, int]:
    peak = predict_peak(components, Placement("host", **how), "cuda")
    return tuple(peak.moments[m] for m in ("encode", "denoise", "decode"))  # type: ignore[return-value]


def test_stages_by_hand() -> None:
    assert moments(*FLUX) == (CLIP + T5, DIT, VAE)
    assert moments(*FLUX, in_turn=True) == (T5, DIT, VAE)
    assert moments(*EXPERTS) == (10, 40, 1), "experts take turns"
    assert moments(*FLUX, Component("controlnet", "denoise", 7)) == (CLIP + T5, DIT + 7, VAE), "works in every step"
    assert moments(*FLUX, Component("kept", "always", 5)) == (CLIP + T5 + 5, DIT + 5, VAE + 5)
    assert predict_peak(FLUX, Placement("device"), "cuda").device_bytes == CLIP + T5 + DIT + VAE


def test_host_and_device() -> None:
    """On a CPU both are one; pinned copies are not on top of anything else."""
    whole = total_bytes(FLUX)
    on_gpu = predict_peak(FLUX, Placement("host"), "cuda", 4, 6)
    assert (on_gpu.device_bytes, on_gpu.host_bytes, on_gpu.worst) == (DIT + 4, whole + 6, "denoise")
    disk = predict_peak(FLUX, Placement("disk"), "cuda", 4, 6)
    assert (disk.device_bytes, disk.host_bytes) == (DIT + 4, CHUNK_BYTES + 6)
    cpu = predict_peak(FLUX, Placement("disk"), "cpu", {"decode": 100}, 6)
    assert (cpu.device_bytes, cpu.host_bytes, cpu.worst) == (VAE + 100, VAE + 100 + 6, "decode")
    assert cpu.attach_host_bytes == whole + DIT, "all is loaded, and the largest part there twice for a moment"


def test_the_first_that_fits_is_chosen() -> None:
    """C31: what the host cannot take goes to disk, or is refused before anything is loaded."""
    big = tuple(Component(p.name, p.stage, p.size_bytes * GIB, p.alternates) for p in FLUX)
    assert choose_placement(big, "cuda")[0] == Placement("host")
    assert choose_placement(big, "cuda", 50 * GIB, 80 * GIB)[0] == Placement("host")
    assert choose_placement(big, "cuda", 50 * GIB, 40 * GIB)[0] == Placement("disk")
    with pytest.raises(BudgetError, match=r"49\.00 GiB of the device .* least possible .* 50\.00 GiB \(in denoise"):
        choose_placement(big, "cuda", 49 * GIB)
    with pytest.raises(BudgetError, match=r"host memory .* least possible is 0\.02 GiB"):
        choose_placement(big, "cuda", 50 * GIB, 1)
    fat = (*big, Component("text_encoder_3", "encode", 40 * GIB))
    assert choose_placement(fat, "cuda", 50 * GIB)[0] == Placement("host", in_turn=True), (
        "63 GiB of encoders, one at a time"
    )


# Parameters (diffusers 0.42.1 class defaults, public configs) of pipelines in bf16: encoders, one expert, decoder.
PUBLISHED = {
    "FLUX.1-dev": ((123_060_480, 4_762_310_656), (11_901_408_320,), 83_819_683),
    "FLUX.2-dev": ((22_901_314_560,), (32_223_281_152,), 84_046_115),
    "Wan2.2-T2V-A14B": ((5_680_910_336,), (14_288_491_584, 14_288_491_584), 126_892_531),
    "Qwen-Image": ((7_070_619_136,), (20_430_401_088,), 126_892_531),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_sizes(model: str) -> None:
    """In bf16 the device needs the denoiser alone; the host what all of it takes, or next to nothing with files."""
    encoders, denoisers, decoder = PUBLISHED[model]
    found = [Component(f"text_encoder_{i}", "encode", 2 * n) for i, n in enumerate(encoders)]
    found += [Component(f"transformer_{i}", "denoise", 2 * n, True) for i, n in enumerate(denoisers)]
    found.append(Component("vae", "decode", 2 * decoder))
    whole = 2 * (sum(encoders) + sum(denoisers) + decoder)
    placement, peak = choose_placement(found, "cuda")
    assert placement == Placement("host") and peak.host_bytes == whole
    assert peak.device_bytes == 2 * denoisers[0] and peak.worst == "denoise"
    placement, peak = choose_placement(found, "cuda", host_bytes=whole - 1)
    assert placement == Placement("disk") and peak.host_bytes == CHUNK_BYTES
    with pytest.raises(BudgetError, match=f"{2 * denoisers[0] / GIB:.2f} GiB"):
        choose_placement(found, "cuda", device_bytes=2 * denoisers[0] - 1)


def measured(how: str) -> dict[str, Any]:
    """Memory of a process that runs a medium pipeline; see `placement_worker.py`."""
    worker = Path(__file__).with_name("placement_worker.py")
    done = subprocess.run([sys.executable, str(worker), how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_prediction_against_the_memory_of_a_process() -> None:
    """Predicted host peaks with and without stages are within 15 % of what a process takes (C31 asks for 20 %)."""
    found = {how: measured(how) for how in ("plain", "stage")}
    for how, row in found.items():
        assert row["predicted_bytes"] == pytest.approx(row["rss_bytes"], rel=0.15), (how, found)
        assert row["predicted_bytes"] == pytest.approx(row["live_bytes"], rel=0.15), (how, found)
    assert found["stage"]["rss_bytes"] < 0.7 * found["plain"]["rss_bytes"], "and it helps"
    assert found["stage"]["sum"] == found["plain"]["sum"], "the pictures are the same bits"
