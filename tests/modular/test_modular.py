"""Modular pipelines: the same levers, verbs and reports as on their classic twins, and the same bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler, SkipLayerGuidance
from diffusers.hooks import LayerSkipConfig

from diffaccel import IncompatibleError, UnsupportedModelError, accelerate, plan, restore
from tests.fingerprint import assert_same, snapshot_pipe
from tests.modular.pipelines import STEPS, TWINS, build, classic_of, components, empty, quiet, run, run_classic

QUICK = ("flux", "wan")  # the others: `make test-all`
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TWINS]
SCHEDULE: dict[str, Any] = {"cache": "schedule", "cache_steps": [0, 2, 5], "cache_min_steps": 0}
FIRST_BLOCK: dict[str, Any] = {"cache": "first_block", "cache_threshold": 1e9, "cache_min_steps": 0}


def strips(pipe: Any) -> dict[str, str]:
    """Branch -> computed and reused steps, of all denoisers."""
    found: dict[str, str] = pipe.acceleration.report.strip()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_end_to_end_beside_the_classic_twin(name: str) -> None:
    """Plain and under the same cache: the same pictures; undone to the last attribute."""
    pipe, twin = build(name), classic_of(name)
    plain = run(pipe, name)
    before = snapshot_pipe(pipe)
    accelerate(pipe, None, strict=True, **SCHEDULE)
    result = run(pipe, name)
    marks = strips(pipe)
    assert tuple(marks) == TWINS[name].branches and all("." in line and len(line) == STEPS for line in marks.values())
    assert not torch.equal(result, plain) and not pipe.acceleration.report.notes
    restore(pipe)
    assert_same(snapshot_pipe(pipe), before)
    assert torch.equal(run(pipe, name), plain)
    if TWINS[name].equal:
        assert torch.equal(run_classic(twin, name), plain)
        accelerate(twin, None, strict=True, **SCHEDULE)
        assert torch.equal(run_classic(twin, name), result)


@pytest.mark.parametrize("wishes", [FIRST_BLOCK, {"guidance": "reuse", "guidance_min_steps": 0}])
def test_other_levers_beside_the_classic_twin(wishes: dict[str, Any]) -> None:
    """A cache that leaves blocks out, and guidance reuse, which finds the branches by their names."""
    pipe, twin = build("wan"), classic_of("wan")
    for one in (pipe, twin):
        accelerate(one, None, strict=True, **wishes)
    assert torch.equal(run(pipe, "wan"), run_classic(twin, "wan"))
    assert strips(pipe) == strips(twin) and any("." in line for line in strips(pipe).values())


def test_verbs_plan_and_report() -> None:
    """As everywhere."""
    pipe = accelerate(build("flux"), None)
    plain = run(pipe, "flux")
    pipe.enable_first_block_cache(threshold=1e9, min_steps=0)
    assert pipe.acceleration.plan.enabled == ("cache.first_block",)
    assert not torch.equal(run(pipe, "flux"), plain) and strips(pipe) == {"cond": "C....C"}
    pipe.disable_cache()
    assert torch.equal(run(pipe, "flux"), plain)
    with pytest.raises(IncompatibleError, match=r"snapshot\(\): FluxModularPipeline is a modular pipeline"):
        pipe.acceleration.snapshot()
    twice = copy.deepcopy(pipe)
    assert torch.equal(run(twice, "flux"), plain) and twice.transformer is not pipe.transformer


# ---- guiders -------------------------------------------------------------------------------------------


def skipping() -> Any:
    """A guider of three conditions, the third from step 2 on."""
    config = LayerSkipConfig(indices=[1], fqn="blocks", skip_attention=False, skip_ff=False)
    return SkipLayerGuidance(
        guidance_scale=4.0,
        skip_layer_guidance_scale=2.0,
        skip_layer_guidance_start=0.3,
        skip_layer_guidance_stop=1.0,
        skip_layer_config=config,
    )


def test_each_branch_has_its_name() -> None:
    """By the guider's identifiers; one that comes later in the loop has a memory of its own."""
    pipe, twin = build("wan"), build("wan")
    for one in (pipe, twin):
        quiet(lambda one=one: one.update_components(guider=skipping()))
    accelerate(pipe, None, strict=True, cache="first_block", cache_threshold=0.0)
    assert torch.equal(run(pipe, "wan"), run(twin, "wan")), "threshold 0"
    assert {branch: len(line) for branch, line in strips(pipe).items()} == {"cond": 6, "uncond": 6, "cond_skip": 4}
    pipe.enable_step_schedule(steps=[0, 3], min_steps=0)
    run(pipe, "wan")
    assert strips(pipe) == {"cond": "C..C..", "uncond": "C..C..", "cond_skip": "CC.."}


def test_a_guider_that_ends() -> None:
    """Guidance up to the half: the unconditional branch has fewer calls."""
    pipe = build("wan")
    quiet(lambda: pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale=4.0, stop=0.5)))
    accelerate(pipe, None, strict=True, **SCHEDULE)
    run(pipe, "wan")
    assert strips(pipe) == {"cond": "C.C..C", "uncond": "C.C"}


# ---- components that come and go -----------------------------------------------------------------------


def test_components_loaded_late() -> None:
    """Accelerated before it has weights: the plan says so, and is made anew before the first run."""
    pipe = empty("wan")
    with pytest.raises(UnsupportedModelError, match="transformer is not loaded yet"):
        accelerate(pipe, None, strict=True, **SCHEDULE)
    accelerate(pipe, None, **SCHEDULE)
    assert "not loaded yet" in pipe.acceleration.plan.item("cache.schedule").reason
    quiet(lambda: pipe.update_components(**components("wan", pipe, classic_of("wan"))))
    whole = accelerate(build("wan"), None, strict=True, **SCHEDULE)
    assert torch.equal(run(pipe, "wan"), run(whole, "wan")) and strips(pipe) == strips(whole)
    restore(pipe)
    assert torch.equal(run(pipe, "wan"), run(build("wan"), "wan"))


@pytest.mark.parametrize("what", ["transformer", "scheduler", "guider"])
def test_components_exchanged_after_accelerate(what: str) -> None:
    """The levers follow; the component that was there before is as it was."""
    pipe, fresh = accelerate(build("wan"), None, strict=True, **SCHEDULE), build("wan")
    run(pipe, "wan")
    made = {
        "transformer": lambda: classic_of("wan22").transformer_2,
        "scheduler": lambda: FlowMatchEulerDiscreteScheduler(shift=2.0),
        "guider": lambda: ClassifierFreeGuidance(guidance_scale=2.0),
    }[what]
    old = getattr(pipe, what)
    for one in (pipe, fresh):
        quiet(lambda one=one: one.update_components(**{what: made()}))
    accelerate(fresh, None, strict=True, **SCHEDULE)
    assert torch.equal(run(pipe, "wan"), run(fresh, "wan")) and set(strips(pipe).values()) == {"C.C..C"}
    assert "forward" not in vars(old) and "step" not in vars(old) and "prepare_models" not in vars(old)


# ---- the clock -----------------------------------------------------------------------------------------


class Sound:
    """Steps a scheduler of its own beside the picture's, as loops do that make sound as well."""

    def __init__(self, block: Any, first: bool) -> None:
        self.block, self.first, self.scheduler, self.steps = block, first, None, 0

    def __call__(self, pipe: Any, state: Any, i: int, t: Any) -> Any:
        if i == 0:
            self.scheduler = copy.deepcopy(pipe.scheduler)
        if self.first:
            self._step(t)
        answer = self.block(pipe, state, i=i, t=t)
        if not self.first:
            self._step(t)
        return answer

    def _step(self, t: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.step(torch.ones(1, 2), t, torch.zeros(1, 2))
        self.steps += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)


def loop_of(pipe: Any) -> Any:
    """The block with the loop."""

    def below(block: Any) -> Any:
        if hasattr(block, "loop_step"):
            return block
        return next((found for inner in block.sub_blocks.values() if (found := below(inner))), None)

    return below(pipe._blocks.sub_blocks["denoise"])


@pytest.mark.parametrize("first", [True, False])
def test_a_second_scheduler_counts_no_steps(first: bool) -> None:
    """The clock is the main scheduler's, whichever of the two is stepped first."""
    pipe = accelerate(build("wan"), None, strict=True, **SCHEDULE)
    expected, steps = run(pipe, "wan"), loop_of(pipe).sub_blocks
    last = list(steps)[-1]
    steps[last] = sound = Sound(steps[last], first)
    assert torch.equal(run(pipe, "wan"), expected) and set(strips(pipe).values()) == {"C.C..C"}
    assert sound.steps == STEPS


def test_a_run_that_fails_leaves_nothing() -> None:
    """Scheduler, guider and loop are not watched any more."""
    pipe = accelerate(build("wan"), None, strict=True, **SCHEDULE)
    expected, calls = run(pipe, "wan"), [0]

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt

    handle = pipe.transformer.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        run(pipe, "wan")
    handle.remove()
    loose = [pipe.scheduler, pipe.guider, loop_of(pipe)]
    names = ("step", "set_timesteps", "prepare_models", "prepare_inputs", "cleanup_models", "progress_bar")
    assert not any(name in vars(part) for part in loose for name in names)
    assert torch.equal(run(pipe, "wan"), expected)


def test_the_bar_of_the_loop_counts() -> None:
    """It belongs to the loop block."""
    pipe, said = accelerate(build("wan"), None, strict=True, **SCHEDULE), []
    loop = loop_of(pipe)

    class Bar:
        disable = False

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def update(self, *_: Any) -> None: ...

        def set_postfix_str(self, text: str = "", refresh: bool = True) -> None:
            said.append(text)

    kind = type(loop)
    loop.__class__ = type(kind.__name__, (kind,), {"progress_bar": lambda self, iterable=None, total=None: Bar()})
    run(pipe, "wan")
    assert said[-1] == "cached 6/12"


def test_what_is_no_pipeline() -> None:
    """Both kinds are named."""
    from diffaccel import InvalidOptionError

    with pytest.raises(InvalidOptionError, match="a DiffusionPipeline or a ModularPipeline"):
        plan(object(), None)
