"""Every fault the doctor knows, put into a real pipeline, is named; healthy pipelines raise no alarm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

from diffaccel import accelerate, doctor, restore
from diffaccel.doctor.faults import FAULTS
from diffaccel.errors import IncompatibleError, InvalidOptionError
from tests import tiny
from tests.fingerprint import differences, snapshot_pipe
from tests.models.families import table
from tests.modular import pipelines

from . import injected

ZOO = (*table.FAMILIES, "sdxl")
QUICK = {"flux_cfg"}  # the others are left to `make test-all`
NOT_RUN = {"undo", "off-plan", "other-nunchaku", "driver", "versions"}  # of these the other tests here


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    """The process-wide attention backend, which some faults move, is put back."""
    before = _AttentionBackendRegistry._active_backend
    yield
    _AttentionBackendRegistry._active_backend = before


@pytest.mark.parametrize(("fault", "make"), injected.CASES, ids=[make.__name__ for _, make in injected.CASES])
def test_an_injected_fault_is_named(fault: str, make: Callable[[], injected.Case]) -> None:
    case = make()
    found = doctor.check(case.pipe, call=case.call, **case.more)
    assert fault in found.faults
    assert not set(found.faults) - {fault, *injected.BESIDE.get(make.__name__, ())}
    finding = next(finding for finding in found.findings if finding.fault == fault)
    assert finding.where and finding.evidence and finding.next_step in str(found)


def test_every_fault_has_its_injection_and_there_are_at_least_twelve() -> None:
    assert {fault for fault, _ in injected.CASES} == set(FAULTS) - NOT_RUN
    assert len(injected.TWELVE) >= 12


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]
)
def test_no_alarm_over_a_healthy_family(family: str) -> None:
    """As it is, and with every lever alone; compile, which takes seconds, in the slow ones."""
    pipe = tiny.build(family) if family == "sdxl" else table.build(family)
    levers = (
        "all" if family not in QUICK else ["quantization.fp8", "vae.tiling", "guidance.reuse", "cache.first_block"]
    )
    call = injected.call_of(family, 12) if family == "sdxl" else table.FAMILIES[family].call()
    call |= {"num_inference_steps": 6} if family in QUICK else {}
    call |= {"output_type": "latent"} if family == "ltx2" else {}  # built without its vocoder
    found = doctor.check(pipe, call=call, levers=levers)
    assert found.findings == () and found.healthy, str(found)
    passed = [trial.lever for trial in found.trials if trial.status == "passed"]
    assert "quantization.fp8" in passed and len(found.trials) == (13 if levers == "all" else 4)


def test_twenty_families_and_more_are_in_the_zoo() -> None:
    assert len(ZOO) >= 20


def test_the_doctor_leaves_no_trace() -> None:
    pipe = tiny.build("flux")
    plain = tiny.run(pipe, "flux")
    before = snapshot_pipe(pipe)
    doctor.check(pipe, call=injected.call_of("flux"), levers=["cache.first_block"])
    assert differences(before, snapshot_pipe(pipe)) == []
    assert tiny.run(pipe, "flux").equal(plain)


def test_an_accelerated_pipeline_stays_so() -> None:
    pipe = accelerate(tiny.build("flux"), None, cache="first_block", cache_threshold=0.3, cache_min_steps=0)
    ours, report, state = tiny.run(pipe, "flux"), pipe.acceleration.report, torch.get_rng_state()
    found = doctor.check(pipe, call=injected.call_of("flux", 6))
    assert found.healthy and pipe.acceleration.plan.enabled == ("cache.first_block",)
    assert torch.get_rng_state().equal(state) and report is not None
    assert tiny.run(pipe, "flux").equal(ours)
    with pytest.raises(IncompatibleError, match="restore"):
        doctor.check(pipe, levers="all")
    restore(pipe)


def test_a_lever_that_leaves_a_trace_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffaccel.doctor import trials

    def forgets(pipe: Any) -> Any:
        restore(pipe)
        pipe.transformer.left_behind = True
        with torch.no_grad():
            pipe.transformer.proj_out.weight.mul_(1.5)
        return pipe

    monkeypatch.setattr(trials, "restore", forgets)
    found = doctor.check(tiny.build("flux"), call=injected.call_of("flux"), levers=["attention.native"])
    assert found.faults == ("undo",) and len(found.findings) == 2
    assert [trial.status for trial in found.trials] == ["failed"]


def test_memory_above_the_plan_is_named() -> None:
    from diffaccel.doctor.trials import above_plan
    from diffaccel.planner.plan import PlanItem

    def item(measured: int) -> PlanItem:
        numbers = {"resident_bytes": 100, "origin": "computed"}
        return PlanItem(
            "offload.layerwise", "module", "enabled", "", "exact", {}, numbers, {"resident_bytes": measured}
        )

    assert [finding.fault for finding in above_plan(item(106))] == ["off-plan"]
    assert list(above_plan(item(104))) == []


def test_bad_input_is_refused_before_anything_is_run() -> None:
    pipe = tiny.build("flux")
    for more, words in (
        ({"call": {"hight": 8}}, "height"),
        ({"levers": ["cache.frist_block"]}, "cache.first_block"),
        ({"memory_gib": -1.0}, "memory_gib must be"),
        ({"host_gib": True}, "host_gib must be"),
    ):
        with pytest.raises(InvalidOptionError, match=words) as refused:
            doctor.check(pipe, **more)
        assert len(str(refused.value)) <= 300
    with pytest.raises(InvalidOptionError, match="must be a diffusers pipeline"):
        doctor.check(object())
    with pytest.raises(IncompatibleError, match="modular"):
        doctor.check(pipelines.build("flux"))


def test_strips_of_a_vae_whose_inner_decode_returns_the_bare_tensor() -> None:
    """HunyuanVideo-1.5; the doctor's trial of vae.tiling raised there once."""
    pipe = table.build("hunyuan_video15")
    call = table.FAMILIES["hunyuan_video15"].call() | {"num_inference_steps": 2}
    found = doctor.check(pipe, call=call, levers=["vae.tiling"])
    assert found.healthy and [trial.status for trial in found.trials] == ["passed"]
