"""What layerwise offload says no to: before anything is touched, with the reason."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import (
    BudgetError,
    DiffaccelError,
    IncompatibleError,
    InvalidOptionError,
    accelerate,
    attach,
    plan,
    restore,
)
from tests import fingerprint, tiny
from tests.invariants.levers import plain
from tests.offload.offloads import ITEM, offloaded, stats


def test_host_store_on_a_cpu(tmp_path: Path) -> None:
    """The weights are on the host already: skipped with the reason, and the verb raises."""
    pipe = accelerate(tiny.build("flux"), preset=None, offload="layerwise")
    item = pipe.acceleration.plan.item(ITEM)
    assert item.status == "skipped" and "in its memory already: store='disk' frees it" in item.reason
    with pytest.raises(DiffaccelError, match="already"):
        pipe.enable_layerwise_offload()


def test_budget(tmp_path: Path) -> None:
    """max_bytes: never exceeded; below the least that is possible, the least is named."""
    pipe = tiny.build("wan")
    with pytest.raises(BudgetError, match="max_bytes=1000: one block at a time needs 47936 bytes"):
        offloaded(pipe, tmp_path, max_bytes=1000)
    assert torch.equal(tiny.run(pipe, "wan"), plain("wan")) and list(tmp_path.iterdir()) == []
    offloaded(pipe, tmp_path, max_bytes=47936, prefetch=0)
    assert torch.equal(tiny.run(pipe, "wan"), plain("wan"))
    assert stats(pipe)["live_bytes_peak"] == 47936
    offloaded(pipe, tmp_path, max_bytes=100_000)
    tiny.run(pipe, "wan")
    assert stats(pipe)["live_bytes_peak"] == 2 * 47936
    with pytest.raises(BudgetError):
        attach(pipe).enable_layerwise_offload(max_bytes=10, store="disk")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"resident_layers": 0}, "offload_resident_layers=0: must be a whole number of at least 1"),
        ({"prefetch": -1}, "offload_prefetch=-1"),
        ({"prefetch": True}, "offload_prefetch=True"),
        ({"max_bytes": 2.5}, r"offload_max_bytes=2\.5"),
        ({"store": "tape"}, "Allowed: disk, host"),
        ({"pin": "yes"}, "offload_pin='yes'"),
        ({"store": "host"}, "offload_folder is for offload_store='disk'"),
        ({"device": "gpu"}, "offload_device='gpu'"),
    ],
)
def test_bad_options(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    """Named, with what was given."""
    with pytest.raises(InvalidOptionError, match=match):
        offloaded(tiny.build("flux"), tmp_path, **options)
    with pytest.raises(InvalidOptionError, match="offload_folder=3"):
        accelerate(tiny.build("flux"), preset=None, offload="layerwise", offload_store="disk", offload_folder=3)


def test_no_place_to_write(tmp_path: Path) -> None:
    """A folder that cannot be: refused before anything is touched."""
    (tmp_path / "file").write_text("")
    pipe = tiny.build("flux")
    with pytest.raises(BudgetError, match="cannot write there"):
        offloaded(pipe, tmp_path / "file" / "below")
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))


def test_disk_full_while_attaching(tmp_path: Path) -> None:
    """The third file does not fit: a clear error, no file left, no weight moved."""
    pipe = tiny.build("flux")
    tiny.run(pipe, "flux")
    before = fingerprint.snapshot_pipe(pipe)
    places = [p.data_ptr() for p in pipe.transformer.parameters()]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # single blocks fit, double blocks do not
    try:
        with pytest.raises(BudgetError, match=r"could not write .* transformer\.transformer_blocks\.0"):
            offloaded(pipe, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == [] and [p.data_ptr() for p in pipe.transformer.parameters()] == places
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


def test_other_offloads_are_refused(tmp_path: Path) -> None:
    """diffusers' group offload, before and after; a denoiser compiled as a whole; a U-Net; a model that fits."""
    from diffusers.hooks import apply_group_offloading

    cpu = torch.device("cpu")
    grouped = tiny.build("flux")
    apply_group_offloading(grouped.transformer, cpu, cpu, offload_type="block_level", num_blocks_per_group=1)
    with pytest.raises(IncompatibleError, match="group offload"):
        offloaded(grouped, tmp_path)

    later = offloaded(tiny.build("flux"), tmp_path)
    apply_group_offloading(later.transformer, cpu, cpu, offload_type="block_level", num_blocks_per_group=1)
    with pytest.raises(IncompatibleError, match=r"switched on while offload\.layerwise is on"):
        tiny.run(later, "flux")

    whole = tiny.build("flux")
    whole.transformer.compile(backend="eager")
    with pytest.raises(IncompatibleError, match="compiled as a whole"):
        offloaded(whole, tmp_path)

    assert plan(tiny.build("sdxl"), preset=None, offload="layerwise").item(ITEM).status == "skipped"
    fits = plan(tiny.build("wan"), preset=None, offload="layerwise", offload_store="disk")
    assert "all 3 blocks" in fits.item(ITEM).reason
