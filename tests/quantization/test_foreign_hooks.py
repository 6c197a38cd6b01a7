"""Other libraries' hooks, casts, offloads and fusions that come after quantization or a LoRA: taking ours off leaves
what a model without ours would give, or is refused before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import accelerate, attach, load_quantized, restore
from diffaccel.errors import IncompatibleError
from tests import tiny
from tests.quantization.foreign_hooks import CPU, HOOKS, layerwise_casting
from tests.quantization.lora.test_verbs import full_state
from tests.quantization.loras import state_dict

LEVERS = {
    "svdquant": lambda p, f: p.enable_svdquant(rank=4, keep_original="host"),
    "fp8": lambda p, f: p.enable_fp8(scheme="weight_only", keep_original="host"),
    "int8": lambda p, f: p.enable_int8(scheme="weight_only", keep_original="host"),
    "branch": lambda p, f: p.acceleration.loras.load(state_dict(tiny.build(f), f), "a"),
    "merged": lambda p, f: p.acceleration.loras.load(state_dict(tiny.build(f), f), "a", merge=True),
}
QUANTIZATIONS = ("svdquant", "fp8", "int8")
CASES = [("flux", lever, hook, whole) for lever in LEVERS for hook in HOOKS for whole in (False, True)] + [
    (family, lever, hook, False)
    for family in ("wan", "sd3", "sdxl")
    for lever, hook in (("svdquant", "group offload"), ("branch", "layerwise casting"), ("branch", "own forward"))
]


def denoiser(pipe: Any) -> Any:
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


def off(pipe: Any, lever: str) -> None:
    if lever in QUANTIZATIONS:
        pipe.disable_quantization()
    else:
        pipe.unload_lora_weights()


@pytest.mark.parametrize(("family", "lever", "hook", "whole"), CASES)
def test_undo_under_hooks_that_came_after(family: str, lever: str, hook: str, whole: bool) -> None:
    twin = tiny.build(family)
    HOOKS[hook](denoiser(twin))
    truth = [tiny.run(twin, family) for _ in range(2)][-1]
    pipe = attach(tiny.build(family))
    LEVERS[lever](pipe, family)
    with_ours = tiny.run(pipe, family)
    HOOKS[hook](denoiser(pipe))
    hooked = tiny.run(pipe, family)
    assert not torch.equal(hooked, truth)
    assert torch.equal(hooked, with_ours) or hook == "layerwise casting"
    if whole:
        restore(pipe)
    else:
        off(pipe, lever)
    assert all(torch.equal(tiny.run(pipe, family), truth) for _ in range(2))


@pytest.mark.parametrize("lever", ["svdquant", "branch", "merged"])
def test_group_offload_with_copies_of_its_own_is_refused(lever: str, tmp_path: Any) -> None:
    """It would bring the weights back that it has in its files (which cannot hold 8-bit weights of ours)."""
    pipe = attach(tiny.build("flux"))
    plain = tiny.run(pipe, "flux")
    LEVERS[lever](pipe, "flux")
    before = tiny.run(pipe, "flux")
    pipe.transformer.enable_group_offload(
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        offload_to_disk_path=str(tmp_path),
    )
    first = tiny.run(pipe, "flux")
    assert (first - before).abs().max() < 1e-5  # in files, weights lie at other places in memory
    if lever == "branch":  # its weights are those of the model
        off(pipe, lever)
        assert (tiny.run(pipe, "flux") - plain).abs().max() < 1e-5
        return
    with pytest.raises(IncompatibleError, match="group offload"):
        off(pipe, lever)
    assert torch.equal(tiny.run(pipe, "flux"), first)


@pytest.mark.parametrize("lever", QUANTIZATIONS)
def test_accelerates_sequential_offload_after_quantization(lever: str) -> None:
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    pipe = attach(tiny.build("flux"))
    plain = tiny.run(pipe, "flux")
    LEVERS[lever](pipe, "flux")
    first = tiny.run(pipe, "flux")
    cpu_offload(pipe.transformer, execution_device=torch.device("cpu"))
    assert all(torch.equal(tiny.run(pipe, "flux"), first) for _ in range(2))
    with pytest.raises(IncompatibleError, match="accelerate's offload"):
        pipe.disable_quantization()
    assert torch.equal(tiny.run(pipe, "flux"), first)
    remove_hook_from_submodules(pipe.transformer)
    assert torch.equal(tiny.run(pipe, "flux"), first)
    pipe.disable_quantization()
    assert torch.equal(tiny.run(pipe, "flux"), plain)


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("lever", QUANTIZATIONS)
def test_layerwise_casting_over_compiled_blocks(lever: str, ran: bool) -> None:
    """It works, or is refused in a sentence at the next run."""
    pipe = attach(tiny.build("flux"))
    LEVERS[lever](pipe, "flux")
    pipe.enable_compile(backend="eager")
    if ran:
        tiny.run(pipe, "flux")
    try:
        layerwise_casting(pipe.transformer)
    except RuntimeError as error:  # PyTorch's, in diffusers' own verb: nothing of ours has run
        assert "swap" in str(error)
        return
    if lever == "svdquant":
        assert torch.isfinite(tiny.run(pipe, "flux")).all()
    else:
        with pytest.raises(IncompatibleError, match=r"layerwise casting .*disable_compile"):
            tiny.run(pipe, "flux")
    pipe.disable_compile()
    assert torch.isfinite(tiny.run(pipe, "flux")).all()


def fuse(pipe: Any) -> None:
    denoiser(pipe).fuse_qkv_projections()


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("lever", QUANTIZATIONS)
def test_fusing_quantized_projections_is_refused_and_changes_nothing(family: str, lever: str) -> None:
    pipe = attach(tiny.build(family))
    plain = tiny.run(pipe, family)
    LEVERS[lever](pipe, family)
    first = tiny.run(pipe, family)
    with pytest.raises(IncompatibleError, match=r"disable_quantization\(\)"):
        fuse(pipe)
    assert torch.equal(tiny.run(pipe, family), first)
    restore(pipe)
    assert torch.equal(tiny.run(pipe, family), plain)


@pytest.mark.parametrize("lever", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["flux", "wan"])
def test_quantization_of_fused_projections(family: str, lever: str) -> None:
    """Fused first: what is fused is quantized, and comes back bit by bit."""
    pipe = tiny.build(family)
    fuse(pipe)
    plain = tiny.run(pipe, family)
    LEVERS[lever](attach(pipe), family)
    assert not torch.equal(tiny.run(pipe, family), plain)
    pipe.disable_quantization()
    assert torch.equal(tiny.run(pipe, family), plain)


@pytest.mark.parametrize("backend", ["torchao", "quanto"])
def test_fusing_other_backends_weights(backend: str) -> None:
    """Refused by the tensors themselves, or the undo waits until the projections are apart again."""
    pytest.importorskip({"torchao": "torchao", "quanto": "optimum.quanto"}[backend])
    pipe = attach(tiny.build("flux"))
    plain = tiny.run(pipe, "flux")
    pipe.enable_int8(scheme="weight_only", backend=backend, keep_original="host")
    try:
        fuse(pipe)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        restore(pipe)
        assert torch.equal(tiny.run(pipe, "flux"), plain)
        return
    with pytest.raises(IncompatibleError, match="unfuse_qkv_projections"):
        pipe.disable_quantization()
    pipe.transformer.unfuse_qkv_projections()
    pipe.disable_quantization()
    assert torch.equal(tiny.run(pipe, "flux"), plain)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_lora_on_fused_projections_is_refused_by_name(family: str, merge: bool) -> None:
    pipe = attach(tiny.build(family))
    state = state_dict(pipe, family)
    fuse(pipe)
    fused = tiny.run(pipe, family)
    with pytest.raises(IncompatibleError, match=r"to_\w* .*fused .*to_\w*kv.*unfuse_qkv_projections\(\)"):
        pipe.acceleration.loras.load(state, "a", merge=merge)
    assert pipe.acceleration.loras.strengths == {} and torch.equal(tiny.run(pipe, family), fused)
    denoiser(pipe).unfuse_qkv_projections()
    pipe.acceleration.loras.load(state, "a", merge=merge)
    truth = attach(tiny.build(family))
    truth.acceleration.loras.load(state, "a", merge=merge)
    assert torch.equal(tiny.run(pipe, family), tiny.run(truth, family))


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_fusing_after_the_lora(family: str, merge: bool) -> None:
    """Merged: fused with it, and taken off when apart again. Beside the layers: refused at the next run."""
    pipe = attach(tiny.build(family))
    plain = tiny.run(pipe, family)
    pipe.acceleration.loras.load(state_dict(pipe, family), "a", merge=merge)
    first = tiny.run(pipe, family)
    fuse(pipe)
    if merge:
        assert ((tiny.run(pipe, family) - first).abs().max() / first.abs().max()) < 1e-4
        with pytest.raises(IncompatibleError, match=r"unfuse_qkv_projections\(\)"):
            pipe.unload_lora_weights()
        with pytest.raises(IncompatibleError, match=r"unfuse_qkv_projections\(\)"):
            restore(pipe)
    else:
        with pytest.raises(IncompatibleError, match=r"lora: .*unfuse_qkv_projections\(\)"):
            tiny.run(pipe, family)
    denoiser(pipe).unfuse_qkv_projections()
    assert torch.equal(tiny.run(pipe, family), first)
    pipe.unload_lora_weights()
    assert torch.equal(tiny.run(pipe, family), plain)


@pytest.mark.parametrize("lever", QUANTIZATIONS)
def test_a_compiled_model_is_quantized_as_a_plain_one(lever: str) -> None:
    pipe, twin = tiny.build("flux"), attach(tiny.build("flux"))
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    attach(pipe)
    plain = tiny.run(pipe, "flux")
    for each in (pipe, twin):
        LEVERS[lever](each, "flux")
    ours, theirs = tiny.run(pipe, "flux"), tiny.run(twin, "flux")
    assert pipe.acceleration.report.stats[f"quantization.{lever}"]["layers"] > 10
    assert torch.equal(ours, theirs) and not torch.equal(ours, plain)
    pipe.disable_quantization()
    assert torch.equal(tiny.run(pipe, "flux"), plain)


@pytest.mark.parametrize("lever", QUANTIZATIONS)
def test_a_plain_state_dict_is_refused_before_anything_is_copied(lever: str) -> None:
    pipe = attach(tiny.build("flux"))
    other = {name: tensor + 1 for name, tensor in tiny.build("flux").transformer.state_dict().items()}
    LEVERS[lever](pipe, "flux")
    first = tiny.run(pipe, "flux")
    block = pipe.transformer.transformer_blocks[0].attn.to_q
    for strict in (True, False):
        with pytest.raises(IncompatibleError, match=r"load_state_dict: .*disable_quantization"):
            pipe.transformer.load_state_dict(other, strict=strict)
    if lever == "svdquant":
        with pytest.raises(IncompatibleError, match="load_state_dict"):
            block.load_state_dict({"weight": torch.zeros(32, 32), "bias": torch.zeros(32)})
    assert torch.equal(tiny.run(pipe, "flux"), first)
    pipe.transformer.load_state_dict(pipe.transformer.state_dict())  # its own is taken
    assert torch.equal(tiny.run(pipe, "flux"), first)
    pipe.disable_quantization()
    pipe.transformer.load_state_dict(other)


def test_what_came_quantized_cannot_be_switched_off_silently(tmp_path: Any) -> None:
    tiny.build("flux").save_pretrained(tmp_path)
    pipe = attach(load_quantized(tmp_path, "fp8_weight_only", dtype=torch.float32))
    first = tiny.run(pipe, "flux")
    for _ in range(2):
        with pytest.raises(IncompatibleError, match=r"disable_quantization: transformer .*checkpoint"):
            pipe.disable_quantization()
        accelerate(pipe, None, quantization="fp8", quantization_scheme="weight_only")  # as it is already
    assert torch.equal(tiny.run(pipe, "flux"), first)


def test_lora_on_a_frozen_quanto_model() -> None:
    quanto = pytest.importorskip("optimum.quanto")
    pipe, truth = tiny.build("flux"), tiny.build("flux")
    state = state_dict(pipe, "flux")
    quanto.quantize(pipe.transformer, weights=quanto.qint8)
    quanto.freeze(pipe.transformer)
    for name, module in truth.transformer.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight = pipe.transformer.get_submodule(name).weight
            module.weight.data = weight.dequantize().clone() if hasattr(weight, "dequantize") else weight.data
    plain = tiny.run(pipe, "flux")
    attach(pipe).acceleration.loras.load(state, "a")
    attach(truth).acceleration.loras.load(state, "a")
    ours, theirs = tiny.run(pipe, "flux").flatten(), tiny.run(truth, "flux").flatten()
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.99
    assert torch.nn.functional.cosine_similarity(ours - plain.flatten(), theirs - plain.flatten(), dim=0) > 0.99
    pipe.acceleration.loras.unload()
    assert torch.equal(tiny.run(pipe, "flux"), plain)


def hook_all(pipe: Any, hook: str) -> None:
    from diffusers.hooks import apply_group_offloading

    for name in ("unet", "transformer", "text_encoder", "text_encoder_2"):
        module = getattr(pipe, name, None)
        if module is not None and hook == "group offload":  # text encoders have no verb for it
            apply_group_offloading(module, CPU, offload_device=CPU, offload_type="leaf_level")
        elif module is not None:
            HOOKS[hook](module)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("hook", ["group offload", "accelerate"])
@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_lora_over_layers_that_hooks_hold(family: str, hook: str, merge: bool) -> None:
    """Hooks first, the LoRA (of text encoders too) then: as the other order, and without a trace afterwards."""
    state = full_state(tiny.build(family), family)
    twin, pipe = attach(tiny.build(family)), tiny.build(family)
    twin.acceleration.loras.load(state, "a", merge=merge)
    plain = tiny.run(pipe, family)
    hook_all(pipe, hook)
    forwards = {name: vars(m).get("forward") for name, m in denoiser(pipe).named_modules()}
    attach(pipe).acceleration.loras.load(state, "a", merge=merge)
    for strength in (1.0, 0.5):
        for each in (twin, pipe):
            each.set_adapters("a", strength)
        assert torch.equal(tiny.run(pipe, family), tiny.run(twin, family))
    pipe.unload_lora_weights()
    assert torch.equal(tiny.run(pipe, family), plain)
    pipe.acceleration.loras.load(state, "a", merge=merge)
    restore(pipe)
    assert torch.equal(tiny.run(pipe, family), plain)
    assert forwards == {name: vars(m).get("forward") for name, m in denoiser(pipe).named_modules()}


def test_a_branch_that_a_users_own_forward_would_pass_by_is_refused() -> None:
    pipe = tiny.build("flux")
    HOOKS["own forward"](pipe.transformer)
    with pytest.raises(IncompatibleError, match="something else holds the forward"):
        attach(pipe).acceleration.loras.load(state_dict(tiny.build("flux"), "flux"), "a")
