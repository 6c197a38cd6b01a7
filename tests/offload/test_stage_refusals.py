"""What stage offload says no to, and what budgets make it do."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import Budget, Plan, accelerate, attach, plan
from diffaccel.errors import BudgetError, DiffaccelError, IncompatibleError, InvalidOptionError
from tests import tiny
from tests.invariants.levers import plain
from tests.offload.stages import ITEM, staged, stats, weights

# ---- refusals ------------------------------------------------------------------------------------------


def reason(pipe: Any, **options: Any) -> str:
    """Why it does not act; nothing may have been touched, and strict must raise."""
    before = [p.data_ptr() for _, module in tiny.component_modules(pipe) for p in module.parameters()]
    item = plan(pipe, None, offload="stage", **options).item(ITEM)
    assert item.status != "enabled"
    with pytest.raises(DiffaccelError):
        accelerate(pipe, None, strict=True, offload="stage", **options)
    assert before == [p.data_ptr() for _, module in tiny.component_modules(pipe) for p in module.parameters()]
    return item.reason


def test_offload_of_others_is_left_alone() -> None:
    pipe = tiny.build("flux")
    pipe.enable_model_cpu_offload(device="cpu")
    assert "accelerate's offload" in reason(pipe)
    pipe = tiny.build("flux")
    cpu = torch.device("cpu")
    pipe.transformer.enable_group_offload(cpu, cpu, offload_type="block_level", num_blocks_per_group=1)
    assert "transformer" in reason(pipe) and "enable_group_offload" in reason(pipe)
    pipe = staged("flux")
    pipe.enable_model_cpu_offload(device="cpu")
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))
    assert any("stood down" in note for note in pipe.acceleration.report.notes), "switched on later: steps aside"


def test_a_shared_component() -> None:
    pipe, other = staged("flux"), tiny.build("flux")
    other.vae = pipe.vae
    assert "vae is shared" in reason(other)
    accelerate(other, None, strict=True, offload="stage", offload_keep=("vae",))
    for each in (other, pipe, other):
        assert torch.equal(tiny.run(each, "flux"), plain("flux"))


def test_places_that_would_not_do(tmp_path: Path) -> None:
    pipe = tiny.build("flux")
    assert "store='disk'" in reason(pipe, offload_store="host")
    file = tmp_path / "file"
    file.write_text("")
    assert "cannot be written to" in reason(pipe, offload_folder=str(file))
    assert "text_encoder_2" in reason(pipe, offload_keep=("txt",)), "says which components there are"
    if os.path.ismount("/dev/shm"):
        assert "in memory" in reason(pipe, offload_folder="/dev/shm")


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """Nothing lost, a clear error, no file left; and the pipeline can be accelerated afterwards."""
    pipe = tiny.build("flux")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # the text encoders fit, the transformer does not
    try:
        with pytest.raises(BudgetError, match=str(tmp_path)):
            accelerate(pipe, None, offload="stage", offload_folder=str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(tmp_path.iterdir()) and "_diffaccel" not in vars(pipe)
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("store", "dsk"), ("folder", 3), ("keep", "vae"), ("in_turn", 1.5), ("text_cache_bytes", -1), ("host_bytes", 0),
     ("device", "cdua"), ("text_cache_bytes", None), ("pin", "yes")],
)  # fmt: skip
def test_bad_values(name: str, value: Any) -> None:
    pipe = attach(tiny.build("flux"))
    with pytest.raises(InvalidOptionError, match=name):
        accelerate(pipe, None, offload="stage", **{f"offload_{name}": value})


# ---- budgets -------------------------------------------------------------------------------------------


GIB = 1024**3


def gib(pipe: Any, *names: str) -> float:
    """Weights of these components."""
    return sum(weights(getattr(pipe, name)) for name in names) / GIB


def test_auto_takes_stages_where_weights_do_not_fit() -> None:
    pipe = tiny.build("flux")
    names = [name for name, _ in tiny.component_modules(pipe)]
    whole, least = gib(pipe, *names), gib(pipe, "transformer")
    assert plan(pipe, "auto", budget=Budget(memory_gib=whole * 1.01)).item(ITEM).status == "skipped"
    decided = plan(pipe, "auto", budget=Budget(memory_gib=least * 1.05))
    assert decided.item(ITEM).status == "enabled"
    assert decided.item(ITEM).predicted["weights_gib"] == pytest.approx(least, abs=1e-4)
    with pytest.raises(BudgetError, match=r"weights alone.*least possible.*denoise"):
        plan(pipe, "auto", budget=Budget(memory_gib=least * 0.9))
    with pytest.raises(BudgetError, match=r"offload='stage' would fit"):
        plan(pipe, None, budget=Budget(memory_gib=least * 1.05))
    with pytest.raises(BudgetError, match=r"offload.layerwise needs"):
        plan(pipe, None, budget=Budget(memory_gib=whole * 0.2), offload="layerwise", offload_store="disk")
    accelerate(pipe, "auto", budget=Budget(memory_gib=least * 1.05), cache=None)
    tiny.run(pipe, "flux")
    assert stats(pipe)["denoise_peak_bytes"] <= least * 1.05 * GIB
    pipe.enable_attention("native")
    assert ITEM in pipe.acceleration.plan.enabled, "the decision stays while other levers change"


def test_a_plan_is_a_file() -> None:
    """A plan with stages survives JSON and TOML, and puts them on again where it is given as the preset."""
    made = plan(tiny.build("flux"), None, offload="stage", offload_keep=("vae",), offload_in_turn=True)
    assert Plan.from_dict(json.loads(json.dumps(made.to_dict()))) == made == Plan.from_toml(made.to_toml())
    pipe = accelerate(tiny.build("flux"), made)
    assert pipe.acceleration.plan.item(ITEM).params == made.item(ITEM).params
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))


def test_a_tight_budget_makes_encoders_take_turns() -> None:
    pipe = tiny.build("sd3")
    pipe.transformer.transformer_blocks = torch.nn.ModuleList(list(pipe.transformer.transformer_blocks)[:1])
    encoders = [gib(pipe, name) for name in ("text_encoder", "text_encoder_2", "text_encoder_3")]
    limit = max(*encoders, gib(pipe, "transformer")) * 1.02
    assert limit < sum(encoders)
    decided = plan(pipe, None, budget=Budget(memory_gib=limit), offload="stage")
    assert "one at a time" in decided.item(ITEM).reason


def test_a_host_limit_refuses_with_numbers() -> None:
    pipe = tiny.build("flux")
    assert "least possible" in reason(pipe, offload_host_bytes=1000)
    with pytest.raises(IncompatibleError, match="no CUDA"):
        if torch.cuda.is_available():
            raise IncompatibleError("no CUDA is what this is about")
        accelerate(pipe, None, offload="stage", offload_device="cuda", strict=True)
    assert "host at most" in plan(pipe, None, offload="stage", offload_device="cuda").item(ITEM).reason
