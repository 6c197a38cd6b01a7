"""Pipelines with control networks, adapters and reference pictures: caches of the whole output act, others say no."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import UnsupportedModelError, accelerate, plan, restore
from diffaccel.caching.gates.base import ProbeGate
from diffaccel.caching.scopes.denoiser import Denoiser
from tests import tiny
from tests.caching.controls import CONTROLLED, STEPS, build, run
from tests.caching.coverage import OPTIONS
from tests.fingerprint import assert_same, snapshot_pipe

QUICK = ("flux_cfg", "sdxl", "sdxl_adapter", "vace")  # the others: `make test-all`
BLOCKS = ["adacache", "custom", "dbcache", "delta_dit", "dicache", "first_block", "interval", "magcache", "seacache"]
BLOCKS += ["taylorseer", "teacache"]
BY_BLOCKS: dict[str, dict[str, Any]] = {"taylorseer": {"cache_use_lite_mode": False}}
WHOLE: dict[str, dict[str, Any]] = {
    "adaptive": {"cache_tolerance": 1e9},
    "schedule": {"cache_steps": [0, 2, 5]},
    "interval": {"cache_interval": 2, "cache_scope": "denoiser"},
    "taylorseer": {"cache_interval": 2, "cache_first_enhance": 1, "cache_use_lite_mode": True},
    "easycache": {"cache_threshold": 1e9, "cache_warmup_steps": 0},
}


def slow(name: str) -> Any:
    """A case that is left to `make test-all`."""
    return pytest.param(name, marks=pytest.mark.slow)


class Count:
    """How often a layer ran."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.calls = 0
        self.handle = layer.register_forward_hook(self._see)

    def _see(self, *_: Any) -> None:
        self.calls += 1


def strip(pipe: Any, branch: int = 0) -> str:
    """Computed and reused steps of one branch."""
    calls = len(pipe.acceleration.report.steps) // STEPS
    return "".join("C" if step.computed else "." for step in pipe.acceleration.report.steps[branch::calls])


def scheduled(name: str, steps: list[int], **more: Any) -> Any:
    """A pipeline that computes these steps."""
    wishes = {"cache": "schedule", "cache_steps": steps, "cache_order": 0, "cache_min_steps": 0} | more
    return accelerate(build(name), None, strict=True, **wishes)


def by_hand(name: str, steps: list[int], pipe: Any = None, **call: Any) -> torch.Tensor:
    """The truth, without a line of the package: a denoiser that hands out its last output at all other steps."""
    one, pipe = CONTROLLED[name], pipe or build(name)
    module, count, last = getattr(pipe, one.denoiser), [0], {}
    forward = module.forward

    def held(*args: Any, **kwargs: Any) -> Any:
        step, branch = divmod(count[0], one.calls)
        count[0] += 1
        if step in steps:
            last[branch] = forward(*args, **kwargs)
        return last[branch]

    module.forward = held
    try:
        return run(pipe, name, **call)
    finally:
        del module.forward


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in CONTROLLED])
def test_whole_answers_are_reused(name: str) -> None:
    """As a loop by hand has it, bit by bit; a network runs where the denoiser does; undone to the last attribute."""
    pipe = build(name)
    plain = run(pipe, name)
    before = snapshot_pipe(pipe)
    accelerate(pipe, None, strict=True, cache="schedule", cache_steps=[0, 2, 5], cache_order=0, cache_min_steps=0)
    network = CONTROLLED[name].network
    count = None if network is None else Count(network(pipe))
    result = run(pipe, name)
    assert torch.equal(result, by_hand(name, [0, 2, 5])) and not torch.equal(result, plain)
    assert strip(pipe) == "C.C..C" and not pipe.acceleration.report.notes
    if count is not None:
        assert count.calls == 3
        assert pipe.acceleration.report.stats["cache.schedule"]["control_skipped"] == "3 of 6"
        count.handle.remove()
    restore(pipe)
    assert_same(snapshot_pipe(pipe), before)
    assert torch.equal(run(pipe, name), plain)


@pytest.mark.parametrize("method", [method for method in WHOLE if method != "schedule"])
def test_every_cache_of_the_whole_output(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving the network out changes nothing of what the cache does; with a gate that looks at the latents too."""
    wishes = {"cache": method, "cache_min_steps": 0, **WHOLE[method]}
    pipe = accelerate(build("flux"), None, strict=True, **wishes)
    count = Count(pipe.controlnet.x_embedder)
    result = run(pipe, "flux")
    assert count.calls == strip(pipe).count("C") < STEPS
    monkeypatch.setattr("diffaccel.caching.control.Control._may_wait", lambda self: False)
    again = accelerate(build("flux"), None, strict=True, **wishes)
    count = Count(again.controlnet.x_embedder)
    assert torch.equal(run(again, "flux"), result) and count.calls == STEPS


def test_a_gate_that_looks_at_blocks_says_no() -> None:
    """Also where the whole output is what it reuses."""
    wishes = {"cache": "custom", "cache_gate": ProbeGate(1e9), "cache_scope": Denoiser(front=1)}
    assert "controlnet" in plan(build("flux"), None, **wishes).item("cache.custom").reason


@pytest.mark.parametrize(
    ("name", "by"), [("flux", "controlnet"), ("sdxl_adapter", "adapter"), ("vace", "vace_blocks")]
)
def test_caches_that_leave_blocks_out_say_no_before_the_run(name: str, by: str) -> None:
    """In the plan, in a sentence, with the way out; the verbs too."""
    pipe = build(name)
    for method in BLOCKS if name == "flux" else ["first_block", "taylorseer"] if name == "vace" else ["deepcache"]:
        wishes = {"cache": method, **OPTIONS.get(method, {}), **BY_BLOCKS.get(method, {})}
        item = plan(pipe, None, **wishes).item(f"cache.{method}")
        assert item.status == "skipped", method
        assert by in item.reason and "schedule" in item.reason and item.predicted == {}
        with pytest.raises(UnsupportedModelError, match=by) as error:
            accelerate(pipe, None, strict=True, **wishes)
        assert len(str(error.value)) <= 300
    accelerate(pipe, None)
    before = pipe.acceleration.plan
    with pytest.raises(UnsupportedModelError, match=by):
        pipe.enable_first_block_cache()
    assert pipe.acceleration.plan == before


def test_without_a_controlnet_nothing_changes() -> None:
    """The negative control."""
    pipe = tiny.build("flux")
    for method in BLOCKS:
        assert "controlnet" not in plan(pipe, None, cache=method, **OPTIONS.get(method, {})).items[0].reason


# ---- what changes in mid-run ---------------------------------------------------------------------------


def test_step_control_begins_anew_at_the_edge() -> None:
    """The adaptive cache: the step at which the control ends is computed, whatever was foreseen before it."""
    wishes = {"cache": "adaptive", "cache_tolerance": 1e3, "cache_max_gap": 12, "cache_min_steps": 0}
    pipe = accelerate(build("flux"), None, strict=True, **wishes)
    count = Count(pipe.controlnet.x_embedder)

    def marks(**call: Any) -> str:
        run(pipe, "flux", num_inference_steps=12, **call)
        return "".join("C" if step.computed else "." for step in pipe.acceleration.report.steps)

    plain, edge = marks(), marks(control_guidance_end=0.5)
    assert plain[6] == "." and edge[6] == "C" and edge[:6] == plain[:6]
    assert count.calls == (plain + edge).count("C")


@pytest.mark.parametrize(("window", "computed"), [((0.0, 0.5), [0, 3]), ((0.4, 1.0), [0, 3])])
def test_the_edge_of_a_window_is_computed(window: tuple[float, float], computed: list[int]) -> None:
    """Guidance of the control that ends or begins in mid-run."""
    call = {"control_guidance_start": window[0], "control_guidance_end": window[1]}
    pipe = scheduled("flux", [0])
    assert torch.equal(run(pipe, "flux", **call), by_hand("flux", computed, **call))
    assert [i for i, mark in enumerate(strip(pipe)) if mark == "C"] == computed
    assert torch.equal(run(pipe, "flux"), by_hand("flux", [0])), "no window, no edge"


def test_an_adapter_that_ends() -> None:
    """The T2I-Adapter's share of the steps."""
    call = {"adapter_conditioning_factor": 0.5}
    pipe = scheduled("sdxl_adapter", [0])
    assert torch.equal(run(pipe, "sdxl_adapter", **call), by_hand("sdxl_adapter", [0, 3], **call))
    assert strip(pipe) == "C..C.."


def exchange(pipe: Any, step: int, tensors: dict[str, Any]) -> torch.Tensor:
    """Another picture to follow (or it is written into) behind this step."""

    def callback(pipe: Any, index: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {name: make(given[name]) for name, make in tensors.items()} if index == step else given

    return run(pipe, "flux", callback_on_step_end=callback, callback_on_step_end_tensor_inputs=["control_image"])


@pytest.mark.parametrize("how", ["another", "written into", "the same values"])
def test_a_picture_that_changes(how: str) -> None:
    """The step behind it is computed, with the network; a callback that hands back what it got changes nothing."""
    make = {
        "another": lambda image: image.flip(1),
        "written into": lambda image: image.mul_(0.5),
        "the same values": lambda image: image,
    }[how]
    pipe, twin = scheduled("flux", [0]), build("flux")
    result = exchange(pipe, 1, {"control_image": make})
    expected = [0] if how == "the same values" else [0, 2]
    assert [i for i, mark in enumerate(strip(pipe)) if mark == "C"] == expected
    module, count, last = twin.transformer, [0], {}
    forward = module.forward

    def held(*args: Any, **kwargs: Any) -> Any:
        if count[0] in expected:
            last[0] = forward(*args, **kwargs)
        count[0] += 1
        return last[0]

    module.forward = held
    assert torch.equal(result, exchange(twin, 1, {"control_image": make}))


def test_a_strength_that_changes() -> None:
    """By whatever way: here a hook of the user's on the network."""
    pipe, calls = scheduled("flux", [0]), [0]

    def louder(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        calls[0] += 1
        return args, kwargs | {"conditioning_scale": 1.0 if calls[0] <= 4 else 2.0}

    pipe.controlnet.register_forward_pre_hook(louder, with_kwargs=True)
    run(pipe, "flux")
    assert strip(pipe) == "C...C."


def test_a_reference_whose_scale_changes() -> None:
    """IP-Adapter: block caches forget too."""

    def callback(pipe: Any, index: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        if index == 2:
            pipe.set_ip_adapter_scale(0.3)
        return given

    for wishes in ({"cache": "schedule", "cache_steps": [0]}, {"cache": "first_block", "cache_threshold": 1e9}):
        pipe = accelerate(build("flux_reference"), None, strict=True, cache_min_steps=0, cache_last_steps=0, **wishes)
        run(pipe, "flux_reference", callback_on_step_end=callback)
        assert strip(pipe) == strip(pipe, 1) == "C..C.."


# ---- where the network has to run in every step --------------------------------------------------------


def test_residuals_of_nobody_that_is_known() -> None:
    """Given by hand, they may be anything in the next step: the cache steps aside, and says so."""
    pipe = accelerate(tiny.build("flux"), None, cache="schedule", cache_steps=[0], cache_min_steps=0)
    samples = [torch.zeros(1, 16, 32)] * 2

    def add(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"controlnet_block_samples": samples}

    pipe.transformer.register_forward_pre_hook(add, with_kwargs=True)
    tiny.run(pipe, "flux")
    assert all(step.computed for step in pipe.acceleration.report.steps)
    assert any("controlnet_block_samples" in note for note in pipe.acceleration.report.notes)


def test_a_pipeline_that_changes_what_the_network_said() -> None:
    """Guess mode puts zeros beside it: the network runs in every step, the cache acts all the same."""
    pipe = scheduled("sdxl", [0, 2])
    count = Count(pipe.controlnet.conv_in)
    assert torch.equal(run(pipe, "sdxl", guess_mode=True), by_hand("sdxl", [0, 2], guess_mode=True))
    assert count.calls == STEPS and strip(pipe) == "C.C..."


def test_a_lever_that_changes_the_arguments() -> None:
    """Guidance reuse cuts the batch in half, and with it what the network said."""
    wishes = {"guidance": "reuse", "guidance_interval": 2, "guidance_min_steps": 0}
    pipe = scheduled("sdxl", [0, 2], **wishes)
    count = Count(pipe.controlnet.conv_in)
    assert torch.isfinite(run(pipe, "sdxl")).all() and count.calls == STEPS and "." in strip(pipe)


# ---- runs that stop, pause or meet others --------------------------------------------------------------


def test_a_run_that_fails_leaves_nothing() -> None:
    """Also between the network and the denoiser."""
    pipe = scheduled("flux", [0, 2])
    expected, calls = run(pipe, "flux"), [0]

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt

    handle = pipe.transformer.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        run(pipe, "flux")
    handle.remove()
    assert torch.equal(run(pipe, "flux"), expected)


@pytest.mark.parametrize("at", [1, 3])
def test_paused_and_resumed(at: int) -> None:
    """As the undisturbed run, with a window that ends behind the pause."""
    call, states = {"control_guidance_end": 0.7}, []
    pipe = scheduled("flux", [0, 2])
    expected = run(pipe, "flux", **call)
    marks = strip(pipe)

    def callback(pipe: Any, index: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        if index == at:
            states.append(pipe.acceleration.snapshot())
        return given

    run(pipe, "flux", callback_on_step_end=callback, **call)
    assert torch.equal(tiny.output(pipe.acceleration.resume(states[0])), expected) and strip(pipe) == marks


def test_with_stage_offload() -> None:
    """A network that is put off is brought in when it runs after all."""
    pipe = scheduled("flux", [0, 2], offload="stage")
    assert torch.equal(run(pipe, "flux"), by_hand("flux", [0, 2]))


def test_a_network_that_two_pipelines_share() -> None:
    """Each run is seen by its own cache alone."""
    one, two = build("flux"), build("flux")
    two.controlnet = one.controlnet
    for pipe in (one, two):
        accelerate(pipe, None, strict=True, cache="schedule", cache_steps=[0, 2], cache_order=0, cache_min_steps=0)
    expected = by_hand("flux", [0, 2])
    assert torch.equal(run(one, "flux"), expected) and torch.equal(run(two, "flux"), expected)
    restore(one)
    assert torch.equal(run(two, "flux"), expected)
    restore(two)
    assert "_diffusers_hook" not in vars(one.controlnet) and "forward" not in vars(one.controlnet)
