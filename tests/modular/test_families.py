"""Modular pipelines without a classic twin: caches of the whole output act in every loop that steps a scheduler."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import diffusers
import pytest
import torch

from diffaccel import DiffaccelError, UnsupportedModelError, accelerate, plan, restore
from diffaccel.models import lookup
from diffaccel.quantization.weights import ScaledWeight
from tests.fingerprint import assert_same, snapshot_pipe
from tests.modular import parts
from tests.modular.families import BY_BLOCKS_NOT, FAMILIES, STEPS, build, run
from tests.modular.pipelines import TWINS, quiet

QUICK = ("ideogram4", "qwen21")  # two denoisers; a store of keys and values. The others: `make test-all`
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
BLOCKS: dict[str, Any] = {"cache": "first_block", "cache_threshold": 1e9, "cache_min_steps": 0}
DENOISERS = ("transformer", "transformer_2", "transformer_ref", "unconditional_transformer")
# A store of keys and values is filled in the first step, which another answer than that of this step cannot do:
SECOND_ANEW = ("qwen21", "qwen21_turbo")


def scheduled(*steps: int) -> dict[str, Any]:
    """Overrides: only these steps are computed, and the last answer stands for the others."""
    return {"cache": "schedule", "cache_steps": list(steps), "cache_order": 0, "cache_min_steps": 0}


def by_hand(pipe: Any, name: str, steps: tuple[int, ...]) -> tuple[torch.Tensor, str]:
    """The truth, without a line of the package: at other steps, a denoiser says what it said last in this place; and
    what the first call of each step did."""
    at, last, scheduler, marks = {"step": 0, "call": 0}, {}, pipe.scheduler, []
    kind = type(scheduler)
    real = {part: getattr(pipe, part).forward for part in DENOISERS if getattr(pipe, part, None) is not None}

    def held(part: str, *args: Any, **kwargs: Any) -> Any:
        if FAMILIES[name].branches[0] == "aside" and kwargs.get("kv_cache_mode") == "extract":
            return real[part](*args, **kwargs)
        key = (part, at["call"])
        at["call"] += 1
        computed = at["step"] in steps or key not in last  # (an expert that takes over has said nothing yet)
        if at["call"] == 1:
            marks.append("C" if computed else ".")
        if computed:
            last[key] = real[part](*args, **kwargs)
        return last[key]

    def counted(method: str) -> Any:
        @functools.wraps(getattr(kind, method))
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self is scheduler:  # and not a copy of it, which sound may have
                at.update(step=at["step"] + 1 if method == "step" else 0, call=0)
            return getattr(kind, method)(self, *args, **kwargs)

        return call

    for part, forward in real.items():
        stand_in: Any = functools.partial(held, part)
        stand_in.__signature__ = inspect.signature(forward)  # loop blocks look at it
        getattr(pipe, part).forward = stand_in
    scheduler.__class__ = type(kind.__name__, (kind,), {name: counted(name) for name in ("step", "set_timesteps")})
    try:
        return run(pipe, name), "".join(marks)
    finally:
        for part in real:
            del getattr(pipe, part).forward
        scheduler.__class__ = kind


@pytest.mark.parametrize("name", NAMES)
def test_whole_answers_are_reused(name: str) -> None:
    """As held by hand, in every branch and loop; undone to the last attribute."""
    family, pipe = FAMILIES[name], build(name)
    assert {part for part in lookup(pipe).denoisers if getattr(pipe, part, None)} <= set(family.denoisers)
    plain, steps = run(pipe, name), (0, 2, 3)
    real = tuple(sorted({*steps, 1})) if name in SECOND_ANEW else steps
    truth, strip = by_hand(pipe, name, real)
    assert torch.equal(run(pipe, name), plain) and not torch.equal(truth, plain)
    before = snapshot_pipe(pipe)
    accelerate(pipe, None, strict=True, **scheduled(*steps))
    assert torch.equal(run(pipe, name), truth)
    assert len(strip) == family.steps * family.loops
    marks = dict(pipe.acceleration.report.strip())
    if family.branches[0] == "aside":  # a call before each loop, computed
        assert marks.pop("aside") == "C" * family.loops
    assert marks == dict.fromkeys([one for one in family.branches if one != "aside"], strip)
    assert not pipe.acceleration.report.notes
    restore(pipe)
    assert_same(snapshot_pipe(pipe), before)
    assert torch.equal(run(pipe, name), plain)


KNOWN = (  # by their cards
    "flux2", "flux2_klein", "flux2_klein_base", "flux_kontext", "ltx2", "ltx25", "qwen_edit", "qwen_edit_plus",
    "qwen_layered", "wan22_i2v", "wan_i2v",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_left_out(name: str) -> None:
    """A cache that looks at blocks acts, once they are learnt where there is no card; or says why it does not."""
    pipe = build(name)
    if name == "wan22_vace":
        with pytest.raises(DiffaccelError, match="vace_blocks of Wan22VaceModularPipeline acts on blocks"):
            accelerate(pipe, None, strict=True, **BLOCKS)
        return
    plain = run(pipe, name)
    if name in KNOWN:
        accelerate(pipe, None, strict=True, **BLOCKS)
    else:
        with pytest.raises(UnsupportedModelError, match="are learnt in the next run"):
            accelerate(pipe, None, strict=True, **BLOCKS)
        accelerate(pipe, None, **BLOCKS)
        assert torch.equal(run(pipe, name), plain)
    result = run(pipe, name)
    if name in BY_BLOCKS_NOT:
        assert torch.equal(result, plain) and pipe.acceleration.report.hit_rate == 0
        said = [*pipe.acceleration.report.notes, *(item.reason for item in pipe.acceleration.plan.items)]
        assert any("kv_cache was given" in one or "could not be learnt" in one for one in said)
    else:
        assert not torch.equal(result, plain) and pipe.acceleration.report.hit_rate >= 0.5
        assert set(pipe.acceleration.report.strip()) == set(FAMILIES[name].branches)
    restore(pipe)
    assert torch.equal(run(pipe, name), plain)


GUIDED = ("flux3", "krea2", "ernie_image", "anima", "minimax_music3", "helios", "wan_animate2")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in GUIDED])
def test_guidance_is_reused_without_a_card(name: str) -> None:
    """Guiders name the branches themselves."""
    pipe = build(name)
    plain = run(pipe, name)
    options = {"guidance_interval": 2, "guidance_first_steps": 1, "guidance_last_steps": 0, "guidance_min_steps": 0}
    accelerate(pipe, None, strict=True, guidance="reuse", **options)
    assert not torch.equal(run(pipe, name), plain)
    assert pipe.acceleration.report.stats["guidance.reuse"]["steps_reuse"] == FAMILIES[name].loops * STEPS // 2
    restore(pipe)
    assert torch.equal(run(pipe, name), plain)


def test_every_modular_pipeline_is_here() -> None:
    """Or beside its classic twin; but for one whose loop steps no scheduler."""
    kinds = {name for name in dir(diffusers) if name.endswith("ModularPipeline")} - {"ModularPipeline"}
    here = {family.modular for family in FAMILIES.values()} | {twins.modular for twins in TWINS.values()}
    assert kinds - here == {"EchoModularPipeline"}


@pytest.mark.slow
def test_a_loop_without_a_scheduler() -> None:
    """Caches stand down, and say why; a schedule of steps is refused by name."""
    pipe = build("echo")
    plain = run(pipe, "echo")
    accelerate(
        pipe, None, strict=True, cache="easycache", cache_threshold=1e9, cache_min_steps=0, cache_warmup_steps=0
    )
    assert torch.equal(run(pipe, "echo"), plain)
    assert any("no scheduler step was seen in this run" in note for note in pipe.acceleration.report.notes)
    accelerate(pipe, None, strict=True, **scheduled(0, 2))
    with pytest.raises(DiffaccelError, match="needs the number of steps, and this loop does not say it"):
        run(pipe, "echo")
    restore(pipe)
    assert torch.equal(run(pipe, "echo"), plain)


# ---- two denoisers, two schedulers ---------------------------------------------------------------------


def test_both_denoisers_are_found() -> None:
    """Ideogram 4's second one runs in every step; fp8 reaches it, too."""
    pipe = build("ideogram4")
    assert lookup(pipe).denoisers == ("transformer", "unconditional_transformer")
    accelerate(pipe, None, **BLOCKS)
    run(pipe, "ideogram4")
    run(pipe, "ideogram4")
    assert dict(pipe.acceleration.report.strip()) == {"cond": "C....C", "uncond": "C....C"}
    restore(pipe)
    accelerate(pipe, None, strict=True, quantization="fp8")  # the blocks were learnt of one, and hold for both
    for one in (pipe.transformer, pipe.unconditional_transformer):
        assert any(isinstance(weight.data, ScaledWeight) for weight in one.parameters())
    restore(pipe)


@pytest.mark.slow
def test_a_reference_model_alone() -> None:
    """MiniMax-H3's `transformer_ref` is a denoiser by itself and beside the other; one of them runs."""
    for names in (("transformer_ref",), ("transformer", "transformer_ref")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe = build("minimax_h3")
            made = parts.h3(*names)
        if "transformer" not in names:
            made["transformer"] = None
        quiet(lambda pipe=pipe, made=made: pipe.update_components(**made))
        assert lookup(pipe).denoisers == names
        assert plan(pipe, None, **scheduled(0)).item("cache.schedule").status == "enabled"


@pytest.mark.slow
def test_sound_beside_the_picture() -> None:
    """A second scheduler steps as often, and both answers of the denoiser are reused."""
    pipe = build("minimax_h3")
    plain = run(pipe, "minimax_h3", output="audio_latents")
    accelerate(pipe, None, strict=True, **scheduled(0, 2))
    assert not torch.equal(run(pipe, "minimax_h3", output="audio_latents"), plain)
    assert dict(pipe.acceleration.report.strip()) == {"cond": "C.C.."}
    assert "step" not in vars(pipe.audio_scheduler) and "step" not in vars(pipe.scheduler)
    restore(pipe)
    assert torch.equal(run(pipe, "minimax_h3", output="audio_latents"), plain)
