"""Public bug reports about step caches, as tests of every method (first-block: test_first_block_and_backends.py)."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import diffaccel.caching
from diffaccel import accelerate, attach, restore
from diffaccel.caching.engine import Scope
from diffaccel.caching.gates.base import Gate, ProbeGate
from diffaccel.caching.gates.easycache import RateGate
from diffaccel.caching.gates.teacache import PolynomialGate
from diffaccel.caching.scopes.denoiser import Denoiser
from diffaccel.caching.scopes.modules import modules_of
from diffaccel.caching.scopes.stack import Stack, blocks_of
from diffaccel.models.registry import lookup
from tests import fingerprint, tiny
from tests.caching.settings import (
    METHODS,
    assert_fresh,
    cached,
    first_latents,
    latents,
    neutral,
    options,
    plain_latents,
    strip,
    tensors_in,
)
from tests.invariants.levers import Stop, raise_at, second_size
from tests.models.families.table import FAMILIES

MORE = ("dbcache", "easycache", "magcache", "schedule", "taylorseer lite", "taylorseer modules", "teacache")
more = pytest.mark.parametrize("method", MORE)


@more
def test_another_size_and_the_run_after_a_cancel_are_fresh(method: str) -> None:
    """ComfyUI-TeaCache#17, unsloth#6703: another size, and the run after a cancel, are those of a fresh pipeline."""
    pipe = cached("sd3", method)
    assert_fresh(pipe, "sd3", method)
    with pytest.raises(Stop):
        latents(pipe, "sd3", seed=5, callback_on_step_end=raise_at(3, Stop("cancelled")))
    assert pipe.acceleration.report.cache_bytes_held == 0
    assert_fresh(pipe, "sd3", method, seed=1)
    assert_fresh(pipe, "sd3", method, seed=1, **second_size("sd3"))


@more
def test_on_off_on_after_a_plain_run(method: str) -> None:
    """diffusers#14037: plain, on, off, on: no error, and outputs repeat."""
    pipe = attach(tiny.build("flux"))
    for _ in range(2):
        assert torch.equal(latents(pipe, "flux"), plain_latents("flux"))
        assert_fresh(accelerate(pipe, preset=None, **options("flux", method)), "flux", method)
        pipe.disable_cache()


@pytest.mark.parametrize("family", ["flux_img2img", "wan_v2v"])
@more
def test_pipelines_that_open_no_context(family: str, method: str) -> None:
    """diffusers#12012: pipelines that never enter cache_context: neutral is plain, the method acts, runs repeat."""
    plain = plain_latents(family)
    quiet = accelerate(tiny.build(family), preset=None, **(neutral("wan", method) | steps_of(family, method, True)))
    assert torch.equal(latents(quiet, family), plain)
    wide = {"cache_threshold": 5.0} if method == "easycache" else {}
    pipe = cached(family, method, **steps_of(family, method, False), **wide)
    result = latents(pipe, family)
    assert pipe.acceleration.report.hit_rate > 0 and not torch.equal(result, plain)
    assert set(strip(pipe)) == ({"cond"} if family == "flux_img2img" else {"cond", "uncond"})
    assert torch.equal(latents(pipe, family), result)


def steps_of(family: str, method: str, neutral: bool) -> dict[str, Any]:
    """Image-to-image and video-to-video run fewer of their six steps."""
    steps = {"flux_img2img": 5, "wan_v2v": 4}[family]
    return {"cache_steps": list(range(steps)) if neutral else [0, 1, 3]} if method == "schedule" else {}


@pytest.mark.parametrize("method", ["dbcache", "interval", "taylorseer lite", "taylorseer modules", "magcache"])
def test_the_step_count_is_not_needed(method: str) -> None:
    """vllm-omni#2194: no step count, then a step count, then sigmas: each as on a fresh pipeline."""

    def call(target: Any, **steps: Any) -> tuple[torch.Tensor, dict[str, str]]:
        kwargs = tiny.call_kwargs("flux", output_type="latent")
        del kwargs["num_inference_steps"]
        return tiny.output(target(**kwargs, **steps)), strip(target)

    pipe = cached("flux", method)
    for steps in ({}, {"num_inference_steps": 6}, {"sigmas": [1.0, 0.8, 0.55, 0.3, 0.1]}):
        result, found = call(pipe, **steps)
        expected, wanted = call(cached("flux", method), **steps)
        assert found == wanted and torch.equal(result, expected)
        assert "." in found["cond"] and len(found["cond"]) == (len(steps.get("sigmas", ())) or (6 if steps else 28))


@pytest.mark.parametrize("method", ["dbcache", "interval", "taylorseer lite", "taylorseer modules", "schedule"])
def test_two_experts_have_a_cache_each(method: str) -> None:
    """diffusers#14025: each expert of Wan 2.2 has a cache of its own, computes its first step and is undone."""
    pipe = tiny.build("wan22")
    plain = latents(pipe, "wan22", num_inference_steps=10)
    before = fingerprint.snapshot_pipe(pipe)
    changes = {"cache_steps": [0, 1, 3, 5, 7]} if method == "schedule" else {}
    accelerate(pipe, preset=None, **options("wan22", method, **changes))
    first = latents(pipe, "wan22", num_inference_steps=10)
    records = pipe.acceleration.report.steps
    for branch in ("cond", "uncond"):
        assert [step.index for step in records if step.branch == branch] == list(range(10))
        for expert in ("transformer", "transformer_2"):
            own = [step.computed for step in records if (step.branch, step.component) == (branch, expert)]
            assert own[0] and len(own) > 2, "a residual of the other expert must not be reused"
            assert False in own, "each expert reuses steps"
    assert torch.equal(latents(pipe, "wan22", num_inference_steps=10), first) and not torch.equal(first, plain)
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


def flux2() -> Any:
    """A tiny FLUX.2 pipeline without its text encoder."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Flux2Pipeline, Flux2Transformer2DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = Flux2Transformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
        ).eval()
    pipe = Flux2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flux2_run(pipe: Any) -> torch.Tensor:
    """Six steps of it to latents."""
    embeds = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(3))
    return tiny.output(
        pipe(
            prompt_embeds=embeds,
            height=64,
            width=64,
            num_inference_steps=6,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        )
    )


@pytest.mark.parametrize("method", ["first_block", "dbcache", "easycache", "schedule", "taylorseer lite", "delta_dit"])
def test_streams_that_are_joined_between_lists(method: str) -> None:
    """diffusers#14280: on FLUX.2, whose streams are joined between block lists, each acts, or is refused at attach."""
    pipe = flux2()
    reference = flux2_run(pipe)
    before = fingerprint.snapshot_pipe(pipe)
    accelerate(pipe, preset=None, strict=True, **neutral("flux", method))
    assert torch.equal(flux2_run(pipe), reference)
    wide = {"cache_threshold": 9.0} if "cache_threshold" in options("flux", method) else {}
    accelerate(pipe, preset=None, strict=True, **options("flux", method, **wide))
    first = flux2_run(pipe)
    assert pipe.acceleration.report.hit_rate > 0 and torch.equal(flux2_run(pipe), first)
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


def bytes_of_modules(family: str) -> int:
    """What the attention and feed-forward modules of one denoiser call say, in bytes."""
    pipe, said = tiny.build(family), [0]
    spec = lookup(pipe)

    def note(module: torch.nn.Module, args: Any, output: Any) -> None:
        said[0] += sum(t.nbytes for t in (output if isinstance(output, tuple) else (output,)))

    for block, row in blocks_of(pipe.transformer, spec):
        for name, module in modules_of(block, row):
            if name not in row.idle:
                module.register_forward_hook(note)
    latents(pipe, family, num_inference_steps=1, **tiny.no_guidance(family))
    return said[0]


def bytes_of(memory: Any) -> int:
    """Bytes of its tensors, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors_in(memory)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("method", ["taylorseer modules", "taylorseer lite", "dbcache", "dicache", "delta_dit"])
@pytest.mark.parametrize("family", ["flux", "wan"])
def test_bytes_held_are_in_the_report(family: str, method: str) -> None:
    """TaylorSeer#36: what a cache holds is in the report, step by step, and for modules it is what they said."""
    pipe, seen = cached(family, method), []

    def note(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        run = pipe.acceleration.run_in_progress()
        branches = [branch for states in run.state.values() for branch in states.values()]
        held = [
            {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(b)} for b in branches
        ]
        seen.append((sum(sum(sizes.values()) for sizes in held), run.bytes_peak))
        return kwargs

    latents(pipe, family, num_inference_steps=8, callback_on_step_end=note)
    # It grows only, so the most is what is held; but for one number per branch that a gate may leave on the device.
    assert all(0 <= held - told <= 8 for held, told in seen)
    assert pipe.acceleration.report.cache_bytes_peak == seen[-1][1] > 0
    assert pipe.acceleration.report.cache_bytes_held == 0
    if method == "taylorseer modules":
        branches = 2 if family == "wan" else 1
        assert seen[-1][0] == 2 * branches * bytes_of_modules(family), "order 1: two computed steps"


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_a_byte_cap_is_kept_to(family: str) -> None:
    """TaylorSeer#36: a cap per branch is kept to: the order falls, and with no room at all nothing is reused."""
    said, branches = bytes_of_modules(family), 2 if family == "wan" else 1
    whole, found = first_latents(family, "taylorseer modules")
    pipe = cached(family, "taylorseer modules", cache_max_bytes=said)
    result = latents(pipe, family)
    assert pipe.acceleration.report.cache_bytes_peak <= said * branches and strip(pipe) == found
    flat = cached(family, "taylorseer modules", cache_order=0)
    assert torch.equal(result, latents(flat, family)) and not torch.equal(result, whole)
    pipe = cached(family, "taylorseer modules", cache_max_bytes=said - 1)
    assert torch.equal(latents(pipe, family), plain_latents(family))
    assert pipe.acceleration.report.cache_bytes_peak == 0


@pytest.mark.parametrize("method", [name for name in METHODS if name != "schedule"])
def test_inputs_wider_than_outputs(method: str) -> None:
    """raylight#44: 36 channels go in (picture and mask join the latents); a reused step gives 16 too."""
    family, shapes = FAMILIES["wan_i2v"], []
    pipe = family.build()
    pipe.set_progress_bar_config(disable=True)
    accelerate(pipe, preset=None, strict=True, **options("wan", method))

    def note(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        tensor = output[0]
        shapes.append((kwargs["hidden_states"].shape[1], tensor.shape[1]))

    pipe.transformer.register_forward_hook(note, with_kwargs=True)
    call = family.call() | {"num_inference_steps": 6, "output_type": "latent"}
    result = tiny.output(pipe(**call, generator=torch.Generator().manual_seed(0)))
    assert set(shapes) == {(36, 16)} and len(shapes) == 12
    assert any("." in line for line in strip(pipe).values()), strip(pipe)
    assert torch.isfinite(result).all()


@pytest.mark.parametrize("method", METHODS)
def test_control_inputs_are_never_reused(method: str) -> None:
    """Comfy-WaveSpeed#70: what a ControlNet adds, and changes at step 4, is in the picture: every step is computed."""

    def run(pipe: Any) -> torch.Tensor:
        calls = [0]

        def add(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            calls[0] += 1
            generator = torch.Generator().manual_seed(9 if calls[0] < 4 else 10)
            samples = [torch.randn(1, 16, 32, generator=generator) for _ in range(2)]
            return args, kwargs | {"controlnet_block_samples": samples}

        handle = pipe.transformer.register_forward_pre_hook(add, with_kwargs=True)
        result = latents(pipe, "flux")
        handle.remove()
        return result

    pipe, reference = cached("flux", method), run(tiny.build("flux"))
    assert not torch.equal(reference, plain_latents("flux"))
    assert torch.equal(run(pipe), reference) and strip(pipe) == {"cond": "C" * 6}
    assert any("controlnet_block_samples" in note for note in pipe.acceleration.report.notes)
    assert_fresh(pipe, "flux", method)


@pytest.mark.parametrize("method", METHODS)
def test_forwards_keep_their_signatures(method: str) -> None:
    """diffusers#14135: forwards keep their signatures, of the denoiser as of every module within."""
    pipe = tiny.build("flux")
    before = {name: inspect.signature(module.forward) for name, module in pipe.transformer.named_modules()}
    accelerate(pipe, preset=None, **options("flux", method))
    for _ in range(2):
        after = {name: inspect.signature(module.forward) for name, module in pipe.transformer.named_modules()}
        assert after == before
        latents(pipe, "flux")


def newer(module: torch.nn.Module, seen: list[Any]) -> None:
    """Give a module a forward with one more keyword, as a later diffusers may, and have callers use it."""
    old: Callable[..., Any] = module.forward

    def forward(self: torch.nn.Module, *args: Any, novelty: Any = None, **kwargs: Any) -> Any:
        seen.append(novelty)
        return old(*args, **kwargs)

    module.forward = types.MethodType(forward, module)
    module.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | {"novelty": 7}), with_kwargs=True)


@pytest.mark.parametrize("method", METHODS)
def test_a_keyword_of_a_later_version_passes_through(method: str) -> None:
    """TeaCache#37: a keyword that we know nothing of passes through, in the denoiser and in its blocks."""
    pipe = tiny.build("flux")
    models: list[int] = []
    blocks: list[int] = []
    newer(pipe.transformer, models)
    for block in tiny.blocks(pipe.transformer):
        newer(block, blocks)
    accelerate(pipe, preset=None, strict=True, **options("flux", method))
    reference, found = first_latents("flux", method)
    assert torch.equal(latents(pipe, "flux"), reference) and strip(pipe) == found
    assert set(models) == {7} and set(blocks) == {7}
    assert 0 < len(blocks) <= 4 * 6


def test_no_forward_is_copied() -> None:
    """TeaCache#37: nothing here is tied to one version of a model's forward by a copy of it."""
    for path in Path(diffaccel.caching.__file__).parent.rglob("*.py"):
        assert "def forward(self, hidden_states" not in path.read_text(), path


MEMBERS: dict[str, tuple[Callable[[float], Gate[Any]], Scope]] = {
    "first blocks": (lambda threshold: ProbeGate(threshold, tested=True), Stack(1, 1)),
    "modulated input": (lambda threshold: PolynomialGate(threshold, coefficients=(1.0, 0.0)), Stack(0)),
    "denoiser input": (RateGate, Denoiser(residual=True)),
}


@pytest.mark.parametrize("kind", MEMBERS)
def test_members_that_straddle_the_threshold_decide_alike(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-omni#6180: members that saw different shards decided differently, and the next exchange hung.

    Two threads stand for the processes (tests/caching/test_distributed.py has real ones): an exchange that only one
    of them comes to breaks the barrier.
    """
    gate, scope = MEMBERS[kind]

    def member(rank: int, threshold: float, group: Any = None) -> tuple[dict[str, str], list[float | None]]:
        pipe = attach(tiny.build("flux")).enable_cache(
            gate=gate(threshold), scope=scope, process_group=group, min_steps=0, last_steps=0
        )
        latents(pipe, "flux", seed=rank)
        return strip(pipe), [step.gate for step in pipe.acceleration.report.steps]

    first = [next(g for g in member(rank, 9.0)[1] if g is not None) for rank in range(2)]
    between = sum(first) / 2
    assert member(0, between)[0] != member(1, between)[0], "alone they decide differently"

    barrier, sent, exchanges = threading.Barrier(2), {}, []

    def all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> None:
        sent[threading.get_ident()] = float(tensor)
        barrier.wait(timeout=60)
        tensor.fill_(max(sent.values()))
        exchanges.append(float(tensor))
        barrier.wait(timeout=60)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    with ThreadPoolExecutor(2) as pool:
        together = [job.result() for job in [pool.submit(member, rank, between, "both") for rank in range(2)]]
    assert together[0] == together[1]
    assert exchanges and len(exchanges) == 2 * sum(value is not None for value in together[0][1])
