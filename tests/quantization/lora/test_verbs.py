"""Diffusers' own LoRA verbs and `scale` per call, on LoRAs of the manager: equal to diffusers with the same file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import accelerate, attach, restore
from diffaccel.errors import DiffaccelError, IncompatibleError, InvalidOptionError
from tests import fingerprint, tiny
from tests.quantization.loras import state_dict

FAMILIES = ("flux", "wan", "sd3", "sdxl")
SCALE = {
    "flux": "joint_attention_kwargs",
    "wan": "attention_kwargs",
    "sd3": "joint_attention_kwargs",
    "sdxl": "cross_attention_kwargs",
}
ENCODERS = {
    "flux": ("text_encoder",),
    "sd3": ("text_encoder", "text_encoder_2"),
    "sdxl": ("text_encoder", "text_encoder_2"),
}


def full_state(pipe: Any, family: str, rank: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """A LoRA over the denoiser and (where the family's loader takes them) the text encoders."""
    state = state_dict(pipe, family, rank, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    for component in ENCODERS.get(family, ()):
        for name, module in getattr(pipe, component).named_modules():
            if name.endswith(("q_proj", "v_proj")):
                down = torch.randn(rank, module.in_features, generator=generator) * 0.3
                up = torch.randn(module.out_features, rank, generator=generator) * 0.3
                state[f"{component}.{name}.lora_A.weight"], state[f"{component}.{name}.lora_B.weight"] = down, up
    return state


def pair(family: str, *seeds: int) -> tuple[Any, Any]:
    """(diffusers' pipeline, ours) with the same LoRAs "a", "b", ... ."""
    plain, own = tiny.build(family), attach(tiny.build(family))
    states = [full_state(plain, family, rank=3 + seed, seed=seed) for seed in seeds]
    for name, state in zip("abc", states, strict=False):
        plain.load_lora_weights(dict(state), adapter_name=name)
        own.acceleration.loras.load(dict(state), name)
    if len(seeds) > 1:
        plain.set_adapters(list("abc"[: len(seeds)]))
    return plain, own


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, of the largest value."""
    return float((a - b).abs().max() / b.abs().max())


def same(plain: Any, own: Any, family: str, **call: Any) -> torch.Tensor:
    """Both give the same; returns it."""
    truth = tiny.run(plain, family, **call)
    assert error(tiny.run(own, family, **call), truth) < 1e-6
    return truth


@pytest.mark.parametrize("family", FAMILIES)
def test_scale_of_a_call_is_diffusers_and_leaves_nothing(family: str) -> None:
    plain, own = pair(family, 0)
    full = same(plain, own, family)
    first = tiny.run(own, family)
    half = same(plain, own, family, **{SCALE[family]: {"scale": 0.5}})
    assert error(half, full) > 1e-3
    assert torch.equal(tiny.run(own, family), first)
    same(plain, own, family, **{SCALE[family]: {"scale": -0.7}})
    off = tiny.run(own, family, **{SCALE[family]: {"scale": 0}})
    assert error(off, tiny.run(tiny.build(family), family)) < 1e-6
    assert torch.equal(tiny.run(own, family), first)


@pytest.mark.parametrize("family", FAMILIES)
def test_scale_leaves_nothing_when_the_run_raises(family: str) -> None:
    _, own = pair(family, 0)
    first = tiny.run(own, family)
    component = own.unet if family == "sdxl" else own.transformer
    layer = next(m for n, m in component.named_modules() if n.endswith(("to_out.0", "ff.net.2", "ffn.net.2")))

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = layer.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        tiny.run(own, family, **{SCALE[family]: {"scale": 0.5}})
    hook.remove()
    assert torch.equal(tiny.run(own, family), first)


@pytest.mark.parametrize("bad", ["1", float("nan"), True, None])
def test_a_scale_that_is_no_number_is_refused(bad: Any) -> None:
    _, own = pair("flux", 0)
    with pytest.raises(InvalidOptionError, match="scale="):
        tiny.run(own, "flux", joint_attention_kwargs={"scale": bad})


@pytest.mark.parametrize("quantization", ["fp8", "int8", "svdquant"])
def test_scale_on_quantized_weights(quantization: str) -> None:
    """A scale of a half is the LoRA at half its strength."""
    own = attach(tiny.build("flux"))
    options = {"rank": 4} if quantization == "svdquant" else {"scheme": "weight_only"}
    getattr(own, f"enable_{quantization}")(**options)
    own.acceleration.loras.load(state_dict(own, "flux"), "a")
    full = tiny.run(own, "flux")
    half = tiny.run(own, "flux", joint_attention_kwargs={"scale": 0.5})
    assert torch.equal(tiny.run(own, "flux"), full)
    own.acceleration.loras.set({"a": 0.5})
    assert error(half, tiny.run(own, "flux")) < 1e-5 < 1e-2 < error(half, full)


@pytest.mark.parametrize("offload", ["stage", "layerwise"])
def test_scale_under_offload_and_a_cache(offload: str) -> None:
    plain, own = pair("flux", 0)
    accelerate(own, None, offload=offload, cache="first_block", cache_threshold=0.0, cache_min_steps=0)
    for scale in (0.5, 0.8, 1.0):
        same(plain, own, "flux", joint_attention_kwargs={"scale": scale})
    same(plain, own, "flux")


def test_scale_in_a_call_of_the_denoiser_by_hand_and_in_encode_prompt() -> None:
    plain, own = pair("flux", 0)
    seen: dict[str, Any] = {}

    def remember(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.update(kwargs)

    hook = plain.transformer.register_forward_pre_hook(remember, with_kwargs=True)
    tiny.run(plain, "flux")
    hook.remove()
    call = {**seen, "joint_attention_kwargs": {"scale": 0.4}, "return_dict": False}
    with torch.no_grad():
        assert error(own.transformer(**call)[0], plain.transformer(**call)[0]) < 1e-6
        for scale in (0.3, None):
            ours = own.encode_prompt("a", "a", lora_scale=scale, max_sequence_length=16)
            assert all(
                error(a, b) < 1e-6
                for a, b in zip(
                    ours[:2], plain.encode_prompt("a", "a", lora_scale=scale, max_sequence_length=16)[:2], strict=True
                )
            )


@pytest.mark.parametrize("order", ["compile first", "LoRA first"])
@pytest.mark.parametrize("family", ["flux", "wan"])
def test_a_new_scale_compiles_nothing_and_no_scale_is_baked_in(family: str, order: str) -> None:
    torch._dynamo.reset()
    plain, own = tiny.build(family), attach(tiny.build(family))
    state = full_state(plain, family)
    plain.load_lora_weights(dict(state), adapter_name="a")
    for step in ("compile", "LoRA") if order == "compile first" else ("LoRA", "compile"):
        if step == "compile":
            own.enable_compile(backend="eager")
        else:
            own.acceleration.loras.load(state, "a")
    same(plain, own, family, **{SCALE[family]: {"scale": 0.5}})
    with torch._dynamo.config.patch(error_on_recompile=True):
        for scale in (1.0, 0.25, -0.5):
            same(plain, own, family, **{SCALE[family]: {"scale": scale}})
        same(plain, own, family)


def test_a_whole_model_that_the_user_compiled_follows_the_scale() -> None:
    torch._dynamo.reset()
    plain, own = tiny.build("flux"), tiny.build("flux")
    state = full_state(plain, "flux")
    plain.load_lora_weights(dict(state), adapter_name="a")
    own.transformer.compile(backend="eager")
    attach(own).acceleration.loras.load(state, "a")
    for scale in (0.5, 1.0, 0.25):
        same(plain, own, "flux", joint_attention_kwargs={"scale": scale})
    same(plain, own, "flux")


@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_scale_of_a_merged_lora_is_refused_before_anything_runs(family: str) -> None:
    own = attach(tiny.build(family))
    own.acceleration.loras.load(state_dict(own, family), "a", merge=True)
    ran = []
    own.text_encoder.register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(IncompatibleError, match=r"merge=True.*loras\.set"):
        tiny.run(own, family, **{SCALE[family]: {"scale": 0.5}})
    assert not ran
    tiny.run(own, family, **{SCALE[family]: {"scale": 1.0}})


@pytest.mark.parametrize("family", FAMILIES)
def test_set_adapters_disable_enable_delete_unload(family: str) -> None:
    plain, own = pair(family, 0, 1)
    base = tiny.run(tiny.build(family), family)
    same(plain, own, family)
    for names, weights in ((["a", "b"], [0.3, -0.6]), ("b", None), (["b", "a"], 0.5), ("a", [0.7])):
        for pipe in (plain, own):
            pipe.set_adapters(names, weights)
        assert set(own.get_active_adapters()) == set(plain.get_active_adapters())
        assert own.get_list_adapters() == plain.get_list_adapters()
        same(plain, own, family)
    for pipe in (plain, own):
        pipe.disable_lora()
    assert torch.equal(tiny.run(own, family), base) and own.get_active_adapters() == plain.get_active_adapters()
    for pipe in (plain, own):
        pipe.enable_lora()
    same(plain, own, family)
    for pipe in (plain, own):
        pipe.set_adapters(["a", "b"], [0.5, 0.5])
        pipe.delete_adapters("a")
    assert own.get_list_adapters() == plain.get_list_adapters()
    same(plain, own, family)
    assert own.unload_lora_weights() is None and own.get_list_adapters() == {} and own.get_active_adapters() == []
    assert torch.equal(tiny.run(own, family), base) and own.acceleration.loras.strengths == {}


BLOCKS = {
    "flux": {"transformer": 0.5, "text_encoder": 0.2},
    "sd3": {"transformer": 0.5},
    "wan": {"transformer": 0.3},
    "sdxl": {"unet": {"down": 0.4, "mid": 0.7, "up": {"block_0": 0.2}}, "text_encoder": 0.1},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_set_adapters_by_component_and_block(family: str) -> None:
    plain, own = pair(family, 0)
    for pipe in (plain, own):
        pipe.set_adapters("a", [BLOCKS[family]])
    same(plain, own, family)
    with pytest.raises(InvalidOptionError, match="adapter_weights has 'vea'"):
        own.set_adapters("a", [{"vea": 1.0}])


def test_loading_by_diffusers_verb_joins_ours_and_never_makes_a_second_set() -> None:
    plain, own = pair("flux", 0)
    other = full_state(tiny.build("flux"), "flux", rank=5, seed=1)
    for pipe in (plain, own):
        pipe.load_lora_weights(dict(other), adapter_name="b")
    assert own.get_active_adapters() == plain.get_active_adapters() == ["b"]
    assert not hasattr(own.transformer, "peft_config") or not own.transformer.peft_config
    same(plain, own, "flux")
    for pipe in (plain, own):
        pipe.set_adapters(["a", "b"], [0.5, 0.4])
    same(plain, own, "flux")
    own.load_lora_weights(dict(other))
    assert "default_0" in own.get_list_adapters()["transformer"]
    with pytest.raises(IncompatibleError, match="hotswap"):
        own.load_lora_weights(dict(other), adapter_name="b", hotswap=True)


def test_the_second_expert_by_diffusers_verb() -> None:
    own = attach(tiny.build("wan22"))
    own.acceleration.loras.load(state_dict(own, "wan"), "high")
    own.load_lora_weights(state_dict(own, "wan", seed=1), adapter_name="low", load_into_transformer_2=True)
    own.set_adapters(["high", "low"])
    assert {(row.adapter, row.component) for row in own.acceleration.loras.report} == {
        ("high", "transformer"),
        ("low", "transformer_2"),
    }


def test_what_cannot_be_says_where_ours_are(tmp_path: Any) -> None:
    _, own = pair("flux", 0)
    for verb, said in (
        (lambda: own.fuse_lora(), "merge=True"),
        (lambda: own.unfuse_lora(), "merge=True"),
        (lambda: own.set_lora_device(["a"], "cpu"), r"loras\.unload"),
        (lambda: own.save_pretrained(tmp_path), r"LoRAs a .*unload_lora_weights"),
    ):
        with pytest.raises(IncompatibleError, match=said) as caught:
            verb()
        assert len(str(caught.value)) <= 300
    with pytest.raises(DiffaccelError, match="'zz'"):
        own.set_adapters("zz")
    with pytest.raises(DiffaccelError, match="'zz'"):
        own.delete_adapters(["zz"])
    own.unload_lora_weights()
    own.save_pretrained(tmp_path)
    assert error(tiny.run(type(own).from_pretrained(tmp_path), "flux"), tiny.run(own, "flux")) < 1e-6


def test_without_ours_the_verbs_are_diffusers_own() -> None:
    own, plain = attach(tiny.build("flux")), tiny.build("flux")
    state = full_state(plain, "flux")
    for pipe in (own, plain):
        pipe.load_lora_weights(dict(state), adapter_name="a")
    assert torch.equal(tiny.run(own, "flux"), tiny.run(plain, "flux")) and own.get_active_adapters() == ["a"]
    scaled = {"joint_attention_kwargs": {"scale": 0.5}}
    assert torch.equal(tiny.run(own, "flux", **scaled), tiny.run(plain, "flux", **scaled))
    own.fuse_lora()
    own.unfuse_lora()
    own.unload_lora_weights()
    assert own.get_list_adapters() == {} and own.acceleration.loras.strengths == {}


def test_restore_leaves_no_trace_of_the_scale() -> None:
    pipe = tiny.build("flux")
    plain, before = tiny.run(pipe, "flux"), fingerprint.snapshot_pipe(pipe)
    attach(pipe).acceleration.loras.load(full_state(pipe, "flux"), "a")
    tiny.run(pipe, "flux", joint_attention_kwargs={"scale": 0.5})
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "flux"), plain)
    vars(pipe).pop("_lora_scale")  # diffusers' own encode_prompt leaves it
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


def test_a_second_accelerate_keeps_the_loras_unless_told_otherwise() -> None:
    plain, own = pair("wan", 0)
    own.set_adapters("a", 0.6)
    plain.set_adapters("a", 0.6)
    accelerate(own, None, attention="native")
    assert any("LoRAs stay loaded" in note and note.endswith(": a") for note in own.acceleration.plan.notes)
    same(plain, own, "wan")
    accelerate(own, "auto")
    assert own.acceleration.loras.strengths == {"a": 0.6}
    accelerate(own, None, lora=False)
    assert "unloaded LoRAs: a" in own.acceleration.plan.notes and own.acceleration.loras.strengths == {}
    assert torch.equal(tiny.run(own, "wan"), tiny.run(tiny.build("wan"), "wan"))
