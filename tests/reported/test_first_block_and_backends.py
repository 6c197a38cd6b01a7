"""Public bug reports about accelerators as tests of ours; each test names the report (repository#number)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Backends

from diffaccel import accelerate, attach, restore
from diffaccel.errors import DiffaccelError, InvalidOptionError
from tests import fingerprint, tiny
from tests.invariants.levers import (
    BACKEND,
    CACHES,
    REUSE_ALL,
    THRESHOLD,
    Stop,
    accelerated,
    cache_options,
    counted,
    fresh,
    fresh_run,
    inner,
    pattern,
    plain,
    put_on,
    raise_at,
    second_size,
    trace,
)
from tests.invariants.test_first_block import ByHand


@pytest.mark.parametrize("family", CACHES)
def test_another_size_starts_afresh(family: str) -> None:
    """ComfyUI-TeaCache#17: a run of another size does not meet the first one's residual."""
    pipe = accelerated(family, "cache", cache_threshold=REUSE_ALL)
    new = accelerated(family, "cache", cache_threshold=REUSE_ALL)
    tiny.run(pipe, family)
    assert torch.equal(tiny.run(pipe, family, **second_size(family)), tiny.run(new, family, **second_size(family)))


@pytest.mark.parametrize("family", CACHES)
def test_a_cancelled_run_leaves_nothing(family: str) -> None:
    """unsloth#6703: after a cancel at step 3 the same and another size are right, and no byte is held."""
    pipe = accelerated(family, "cache")
    with pytest.raises(Stop):
        tiny.run(pipe, family, seed=5, callback_on_step_end=raise_at(3, Stop("cancelled")))
    assert pipe.acceleration.report.cache_bytes_held == 0
    assert len(pipe.acceleration.report.steps) == 4 * (2 if family == "wan" else 1)
    assert torch.equal(tiny.run(pipe, family, seed=1), fresh(family, "cache", seed=1))
    with pytest.raises(Stop):
        tiny.run(pipe, family, seed=5, callback_on_step_end=raise_at(3, Stop("cancelled")))
    call = second_size(family) | {"seed": 1}
    assert torch.equal(tiny.run(pipe, family, **call), fresh(family, "cache", **call))


@pytest.mark.parametrize("family", CACHES)
def test_on_off_on_after_a_plain_run(family: str) -> None:
    """diffusers#14037: plain, on, off, on: no error, and outputs repeat."""
    pipe = attach(tiny.build(family))
    options = {"threshold": THRESHOLD[family], "min_steps": 0, "last_steps": 0}
    for _ in range(2):
        assert torch.equal(tiny.run(pipe, family), plain(family))
        pipe.enable_first_block_cache(**options)
        assert torch.equal(tiny.run(pipe, family), fresh(family))
        pipe.disable_cache()


def test_a_pipeline_that_opens_no_context() -> None:
    """diffusers#12012: FluxImg2Img never enters cache_context; the cache works all the same."""
    pipe = accelerated("flux_img2img", "cache", cache_threshold=REUSE_ALL)
    with counted(inner(pipe)) as calls:
        result = tiny.run(pipe, "flux_img2img")
    assert pipe.acceleration.report.hit_rate > 0.5 and calls[0] == 1
    assert not torch.equal(result, plain("flux_img2img"))
    quiet = accelerated("flux_img2img", "cache", cache_threshold=0.0)
    assert torch.equal(tiny.run(quiet, "flux_img2img"), plain("flux_img2img"))


def test_two_calls_per_step_without_a_context() -> None:
    """Wan V2V calls cond and uncond in turn and names neither: their caches are kept apart all the same."""
    pipe = accelerated("wan_v2v", "cache", cache_threshold=0.0)
    assert torch.equal(tiny.run(pipe, "wan_v2v"), plain("wan_v2v"))

    pipe = accelerated("wan_v2v", "cache", cache_threshold=THRESHOLD["wan_v2v"])
    twin = tiny.build("wan_v2v")
    reference = ByHand(twin, "wan", THRESHOLD["wan_v2v"], branches=2)
    expected = tiny.run(twin, "wan_v2v")
    result = tiny.run(pipe, "wan_v2v")
    names = list(dict.fromkeys(branch for _, branch, _ in trace(pipe)))
    assert [pattern(pipe, name) for name in names] == reference.computed
    assert False in pattern(pipe)
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)
    # Without guidance the calls of one branch must not be taken for those of two.
    tiny.run(pipe, "wan_v2v", guidance_scale=1.0)
    assert len({branch for _, branch, _ in trace(pipe)}) == 1
    steps = [index for index, _, _ in trace(pipe)]
    assert steps == list(range(steps[0], steps[0] + len(steps)))


@pytest.mark.parametrize("family", CACHES)
def test_threshold_zero_is_off(family: str) -> None:
    """ComfyUI-TeaCache#8: threshold 0 computes everything, and nothing stays afterwards."""
    pipe = accelerated(family, "cache", cache_threshold=0)
    assert torch.equal(tiny.run(pipe, family), plain(family))
    restore(pipe)
    assert torch.equal(tiny.run(pipe, family), plain(family))


@pytest.mark.parametrize("family", CACHES)
def test_off_is_off(family: str) -> None:
    """ComfyUI-CacheDiT#23: after detach all blocks run in every step and no attribute is left on a module."""
    pipe = tiny.build(family)
    with counted(inner(pipe)) as full:
        tiny.run(pipe, family)
    before = {path: set(vars(module)) for path, module in pipe.transformer.named_modules()}
    put_on(pipe, family, "both")
    tiny.run(pipe, family)
    restore(pipe)
    with counted(inner(pipe)) as calls:
        assert torch.equal(tiny.run(pipe, family), plain(family))
    assert calls == full
    for path, module in pipe.transformer.named_modules():
        assert set(vars(module)) - {"_diffusers_hook"} == before[path] - {"_diffusers_hook"}, path


# C08 (two pipelines on one transformer) is in invariants/test_3_neighbours.py.


@pytest.mark.parametrize("family", CACHES)
def test_one_decision_for_the_whole_batch(family: str) -> None:
    """nunchaku#596: the decision is one for the batch, and the documentation says so; see caching/test_grouped.py."""
    pipe = accelerated(family, "cache")
    tiny.run(pipe, family, prompt=[*tiny.PROMPTS[:2]])
    assert len(pattern(pipe)) == tiny.STEPS * (2 if family == "wan" else 1)
    assert "batch" in pipe.enable_first_block_cache.__doc__


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_the_step_count_is_not_needed(family: str) -> None:
    """vllm-omni#2194: no step count, then a step count, then sigmas: each as on a fresh pipeline."""
    sigmas = [1.0, 0.8, 0.55, 0.3, 0.1]
    pipe = accelerated(family, "cache")

    def call(target: Any, **steps: Any) -> tuple[torch.Tensor, list[Any]]:
        kwargs = tiny.call_kwargs(family)
        del kwargs["num_inference_steps"]
        return tiny.output(target(**kwargs, **steps)), trace(target)

    for steps in ({}, {"num_inference_steps": 6}, {"sigmas": sigmas}, {}):
        result, records = call(pipe, **steps)
        expected, wanted = call(accelerated(family, "cache"), **steps)
        assert torch.equal(result, expected) and records == wanted
        assert len(records) == (len(steps.get("sigmas", ())) or steps.get("num_inference_steps", 28))


def test_guards_count_the_steps_of_given_sigmas() -> None:
    """min_steps and last_steps count the steps of the scheduler, not the argument's."""
    pipe = accelerated("flux", "cache", cache_threshold=REUSE_ALL, cache_last_steps=2)
    kwargs = tiny.call_kwargs("flux")
    del kwargs["num_inference_steps"]
    pipe(**kwargs, sigmas=[1.0, 0.8, 0.55, 0.3, 0.1])
    assert pattern(pipe) == [True, False, False, True, True]


def test_two_experts_have_a_cache_each() -> None:
    """diffusers#14025: each expert of Wan 2.2 has its own cache; the steps are those of the one schedule."""
    steps = 8
    pipe = accelerated("wan22", "cache", cache_threshold=REUSE_ALL)
    models = {"transformer": pipe.transformer, "transformer_2": pipe.transformer_2}
    seen: dict[str, list[int]] = {name: [0, 0] for name in models}
    handles = []
    for name, model in models.items():
        for which, module in enumerate((model.blocks[0], model.blocks[1].attn1)):

            def note(*_: Any, name: str = name, which: int = which) -> None:
                seen[name][which] += 1

            handles.append(module.register_forward_hook(note))
    result = tiny.run(pipe, "wan22", num_inference_steps=steps)
    for handle in handles:
        handle.remove()
    assert torch.isfinite(result).all() and not torch.equal(result, plain("wan22", num_inference_steps=steps))
    assert sum(first for first, _ in seen.values()) == 2 * steps
    assert all(first > 2 for first, _ in seen.values()), "both experts must run several steps here"
    assert all(second == 2 for _, second in seen.values()), "each expert computes its first step, in both branches"
    for branch in ("cond", "uncond"):
        assert [index for index, name, _ in trace(pipe) if name == branch] == list(range(steps))
    again = tiny.run(pipe, "wan22", num_inference_steps=steps)
    assert torch.equal(again, result)


def test_two_experts_neutral_and_undone() -> None:
    """Threshold 0 on both experts is bit-equal; restore takes it off both."""
    pipe = tiny.build("wan22")
    tiny.run(pipe, "wan22")
    before = fingerprint.snapshot_pipe(pipe)
    put_on(pipe, "wan22", "cache", cache_threshold=0.0)
    assert torch.equal(tiny.run(pipe, "wan22"), plain("wan22"))
    accelerate(pipe, preset=None, attention=BACKEND, **cache_options("wan22"))
    tiny.run(pipe, "wan22")
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert torch.equal(tiny.run(pipe, "wan22"), plain("wan22"))


# More reports, and more methods than the first-block cache, are in test_every_cache.py.


@pytest.mark.parametrize("kind", ["same samples", "samples that change"])
def test_control_inputs_are_never_reused(kind: str) -> None:
    """Comfy-WaveSpeed#70: what a ControlNet adds between blocks is never reused; the plain result comes out.

    Without this the cache would hand out a residual that holds the ControlNet's input of an earlier step.
    """
    pipe, twin = accelerated("flux", "cache", cache_threshold=REUSE_ALL), tiny.build("flux")

    def run(target: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(9)
        fixed = [torch.randn(1, 16, 32, generator=generator) for _ in range(2)]

        def add(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            more = fixed if kind == "same samples" else [torch.randn(1, 16, 32, generator=generator) for _ in range(2)]
            return args, kwargs | {"controlnet_block_samples": more}

        handle = target.transformer.register_forward_pre_hook(add, with_kwargs=True)
        result = tiny.run(target, "flux")
        handle.remove()
        return result

    reference = run(twin)
    assert not torch.equal(reference, plain("flux"))
    assert torch.equal(run(pipe), reference)
    assert torch.equal(
        tiny.run(pipe, "flux"), tiny.run(accelerated("flux", "cache", cache_threshold=REUSE_ALL), "flux")
    )


@pytest.mark.parametrize("skipped", [[0], [1], [2], [1, 2]])
def test_layers_that_the_pipeline_itself_skips(skipped: list[int]) -> None:
    """SD3's skip-layer guidance calls the model once more per step, without some blocks: kept apart.

    The blocks left out may be the very ones at which a cache decides (the first) or stores (the last).
    """
    call = {
        "skip_guidance_layers": skipped,
        "skip_layer_guidance_start": 0.0,
        "skip_layer_guidance_stop": 0.7,
        "skip_layer_guidance_scale": 2.0,
    }
    reference = plain("sd3", **call)
    assert not torch.equal(reference, plain("sd3"))
    pipe = accelerated("sd3", "cache", cache_threshold=0.0)
    assert torch.equal(tiny.run(pipe, "sd3", **call), reference)
    put_on(pipe, "sd3", "cache", cache_threshold=REUSE_ALL)
    with counted(tiny.denoiser(pipe)) as calls:
        first = tiny.run(pipe, "sd3", **call)
    assert torch.isfinite(first).all() and calls[0] > tiny.STEPS
    steps = [index for index, _, _ in trace(pipe)]
    assert sorted(set(steps)) == list(range(tiny.STEPS)) and len(steps) == calls[0]
    assert pipe.acceleration.report.hit_rate > 0
    assert torch.equal(tiny.run(pipe, "sd3", **call), first)
    put_on(pipe, "sd3", "cache")
    assert torch.equal(tiny.run(pipe, "sd3"), fresh("sd3"))


# C25 (signatures) is in invariants/test_identity.py.


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_second_accelerate_is_a_clean_swap(family: str) -> None:
    """diffusers#2907: a second accelerate, the same or another, is a clean swap; hooks never stack."""
    pipe = tiny.build(family)
    tiny.run(pipe, family)
    before = fingerprint.snapshot_pipe(pipe)
    for lever in ("cache", "cache", "both", "attach"):
        put_on(pipe, family, lever)
        result, records = fresh_run(family, lever)
        assert torch.equal(tiny.run(pipe, family), result), lever
        assert trace(pipe) == records
    for _, module in tiny.denoiser(pipe).named_modules():
        names = getattr(getattr(module, "_diffusers_hook", None), "_hook_order", [])
        assert len([name for name in names if name.startswith("diffaccel.")]) <= 1, names
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


def test_a_failing_second_call_keeps_the_first() -> None:
    """A second accelerate that is refused leaves the first in force, and restore still undoes everything."""
    pipe = tiny.build("flux")
    tiny.run(pipe, "flux")
    before = fingerprint.snapshot_pipe(pipe)
    put_on(pipe, "flux", "cache")
    for bad in (
        {"cache": "first_blok"},
        {"cache": "first_block", "cache_threshold": -1.0},
        {"attention": "flahs"},
    ):
        with pytest.raises(InvalidOptionError):
            accelerate(pipe, preset=None, **bad)
        assert torch.equal(tiny.run(pipe, "flux"), fresh("flux"))
    with pytest.raises(DiffaccelError):
        pipe.enable_attention("sage")
    assert torch.equal(tiny.run(pipe, "flux"), fresh("flux"))
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_a_backend_moves_its_target_alone(family: str) -> None:
    """diffusers#11168: a backend on one model moves neither the process-wide default nor a second model."""
    default = Backends._active_backend
    pipe, other = tiny.build(family), tiny.build(family)
    tiny.run(pipe, family)
    put_on(pipe, family, "attention")
    assert not torch.equal(tiny.run(pipe, family), plain(family))
    assert Backends._active_backend == default
    assert torch.equal(tiny.run(other, family), plain(family))
    for module in other.transformer.modules():
        if hasattr(module, "processor"):
            assert getattr(module.processor, "_attention_backend", None) is None
    restore(pipe)
    assert Backends._active_backend == default
    assert torch.equal(tiny.run(pipe, family), plain(family))


class Toy(ModelHook):
    """A lower hook with a new_forward, as offload and casting have."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Count and go on."""
        self.calls += 1
        return self.fn_ref.original_forward(*args, **kwargs)


@pytest.mark.parametrize("family", CACHES)
def test_a_lower_hook_goes_while_the_cache_is_on(family: str) -> None:
    """A lower hook that replaces the forward is removed while the cache is on: the cache still skips."""
    pipe = tiny.build(family)
    hooks = []
    for block in tiny.blocks(pipe.transformer):
        hooks.append(Toy())
        HookRegistry.check_if_exists_or_initialize(block).register_hook(hooks[-1], "toy")
    put_on(pipe, family, "cache")
    tiny.run(pipe, family)
    assert hooks[1].calls == pattern(pipe).count(True) < hooks[0].calls, "a skipped block does not run its hooks"
    HookRegistry.check_if_exists_or_initialize(pipe.transformer).remove_hook("toy", recurse=True)
    for hook in hooks:
        hook.calls = 0
    for _ in range(2):
        with counted(inner(pipe)) as calls:
            assert torch.equal(tiny.run(pipe, family), fresh(family))
        assert 0 < calls[0] == pattern(pipe).count(True) < len(pattern(pipe))
    assert not any(hook.calls for hook in hooks)
    restore(pipe)
    assert torch.equal(tiny.run(pipe, family), plain(family))
