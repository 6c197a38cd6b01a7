"""LoRAs: against diffusers' and peft's own, in every order with the other levers, and off again bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import accelerate, attach, restore
from diffaccel.errors import IncompatibleError, InvalidOptionError
from tests import fingerprint, tiny
from tests.quantization.loras import state_dict

FAMILIES = ("flux", "wan", "sd3", "sdxl")


def peft_output(family: str, adapters: dict[str, tuple[dict[str, torch.Tensor], float]]) -> torch.Tensor:
    """What diffusers and peft make of the adapters."""
    pipe = tiny.build(family)
    for name, (state, _) in adapters.items():
        pipe.load_lora_weights(dict(state), adapter_name=name)
    pipe.set_adapters(list(adapters), [strength for _, strength in adapters.values()])
    return tiny.run(pipe, family)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Equal up to rounding."""
    return bool(((a - b).abs().max() / b.abs().max()) < tolerance)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_peft_and_goes_without_a_trace(family: str, merge: bool) -> None:
    pipe = tiny.build(family)
    plain = tiny.run(pipe, family)
    before = fingerprint.snapshot_pipe(pipe)
    one, two = state_dict(pipe, family), state_dict(pipe, family, rank=5, seed=1)
    loras = attach(pipe).acceleration.loras
    assert loras.load(one, "one", 0.7, merge=merge) is pipe
    first = tiny.run(pipe, family)
    assert close(first, peft_output(family, {"one": (one, 0.7)})) and not close(first, plain, 1e-2)
    loras.load(two, "two", -0.4, merge=merge)
    assert close(tiny.run(pipe, family), peft_output(family, {"one": (one, 0.7), "two": (two, -0.4)}))
    assert loras.strengths == {"one": 0.7, "two": -0.4}
    assert {row.how for row in loras.report} == {"merged" if merge else "branch"}
    assert len(loras.report) == len(one) // 2 + len(two) // 2
    loras.unload("two")
    assert torch.equal(tiny.run(pipe, family), first)
    loras.unload()
    assert torch.equal(tiny.run(pipe, family), plain)
    loras.load(one, merge=merge)
    tiny.run(pipe, family)
    restore(pipe)
    assert torch.equal(tiny.run(pipe, family), plain)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


@pytest.mark.parametrize("merge", [False, True])
def test_strengths_are_absolute(merge: bool) -> None:
    """0.5, 1.0, 0.5, removed: the third run is the first, the fourth the base. Set twice is set once; 0 is off."""
    pipe = attach(tiny.build("flux"))
    plain = tiny.run(pipe, "flux")
    loras = pipe.acceleration.loras
    loras.load(state_dict(pipe, "flux"), "a", 0.5, merge=merge)
    half = tiny.run(pipe, "flux")
    loras.set({"a": 1.0})
    assert not close(tiny.run(pipe, "flux"), half, 1e-2)
    loras.set({"a": 0.5})
    assert torch.equal(tiny.run(pipe, "flux"), half)
    loras.set({"a": 0.5})
    assert torch.equal(tiny.run(pipe, "flux"), half)
    loras.set({"a": 0})
    assert torch.equal(tiny.run(pipe, "flux"), plain) and loras.strengths == {"a": 0}
    loras.unload("a")
    assert torch.equal(tiny.run(pipe, "flux"), plain)


@pytest.mark.parametrize(
    ("family", "quantization"), [("flux", "fp8"), ("flux", "int8"), ("flux", "svdquant"), ("wan", "fp8")]
)
def test_every_order_gives_one_picture(family: str, quantization: str, tmp_path: Any) -> None:
    """Quantization, compile, offload and the LoRA in any order of the calls, and taken off in another."""
    state = state_dict(tiny.build(family), family)
    scheme = {"scheme": "weight_only"} if quantization != "svdquant" else {"rank": 4}
    verbs = {
        "quantization": lambda p: getattr(p, f"enable_{quantization}")(**scheme, keep_original="host"),
        "compile": lambda p: p.enable_compile(backend="eager"),
        "offload": lambda p: p.enable_layerwise_offload(store="disk", folder=str(tmp_path), resident_layers=1),
        "lora": lambda p: p.acceleration.loras.load(state, "a", 0.6),
    }
    found = []
    for order in (tuple(verbs), tuple(reversed(verbs))):
        pipe = tiny.build(family)
        plain = tiny.run(pipe, family)
        attach(pipe)
        for name in order:
            verbs[name](pipe)
            tiny.run(pipe, family)
        found.append(tiny.run(pipe, family))
        pipe.acceleration.loras.unload("a")
        without = tiny.run(pipe, family)
        assert not close(without, found[-1], 1e-2)
        pipe.disable_quantization().disable_offload().disable_compile()
        assert torch.equal(tiny.run(pipe, family), plain)
        restore(pipe)
        assert torch.equal(tiny.run(pipe, family), plain)
    assert all(close(result, found[0]) for result in found)


def test_the_branch_is_not_computed_in_eight_bits() -> None:
    """FP8 storage first and the adapter first agree, and the error is that of the base alone."""
    pipe = tiny.build("flux")
    state = state_dict(pipe, "flux")
    exact = peft_output("flux", {"a": (state, 1.0)})
    base = tiny.run(pipe, "flux")
    attach(pipe).enable_fp8(scheme="storage", keep_original="host")
    error = (tiny.run(pipe, "flux") - base).norm() / base.norm()
    pipe.acceleration.loras.load(state, "a")
    first = tiny.run(pipe, "flux")
    other = attach(tiny.build("flux"))
    other.acceleration.loras.load(state, "a")
    other.enable_fp8(scheme="storage", keep_original="host")
    assert torch.equal(tiny.run(other, "flux"), first)
    assert (first - exact).norm() / exact.norm() < max(0.05, 2 * float(error))


def test_bad_keys_are_all_listed_and_nothing_is_applied() -> None:
    pipe = attach(tiny.build("flux"))
    plain = tiny.run(pipe, "flux")
    good = state_dict(pipe, "flux")
    name = "transformer.transformer_blocks.0.attn.to_q"
    cases = {
        "no such layer": {f"transformer.nowhere.lora_{x}.weight": torch.ones(2, 2) for x in "AB"},
        "layer takes": {f"{name}.lora_A.weight": torch.ones(2, 7), f"{name}.lora_B.weight": torch.ones(7, 2)},
        "other half": {"transformer.transformer_blocks.0.attn.to_k.lora_A.weight": torch.ones(2, 2)},
    }
    for said, bad in cases.items():
        with pytest.raises(InvalidOptionError, match=said):
            pipe.acceleration.loras.load({**good, **bad}, "bad")
    both = {**cases["no such layer"], **cases["layer takes"]}
    with pytest.raises(InvalidOptionError, match=r"(?s)^2 keys.*Nothing was applied"):
        pipe.acceleration.loras.load({**good, **both}, "bad")
    assert pipe.acceleration.loras.strengths == {} and torch.equal(tiny.run(pipe, "flux"), plain)


def test_bad_arguments() -> None:
    pipe = attach(tiny.build("wan"))
    loras, state = pipe.acceleration.loras, state_dict(pipe, "wan")
    loras.load(state, "a")
    for bad in (float("nan"), True, "1"):
        with pytest.raises(InvalidOptionError, match="strength"):
            loras.load(state, "b", bad)
        with pytest.raises(InvalidOptionError, match="strength"):
            loras.set({"a": bad})
    with pytest.raises(InvalidOptionError, match="'a'"):
        loras.load(state, "a")
    with pytest.raises(InvalidOptionError, match="Allowed: a"):
        loras.set({"b": 1.0})
    with pytest.raises(InvalidOptionError, match="Allowed: a"):
        loras.unload("b")
    with pytest.raises(InvalidOptionError, match="matches none"):
        loras.load(state, "b", layers="*.attn9.*")
    assert loras.strengths == {"a": 1.0}


def test_what_a_file_must_not_hold_and_options_that_do_not_exist() -> None:
    pipe = attach(tiny.build("wan"))
    state = state_dict(pipe, "wan")
    next(iter(state.values()))[0, 0] = float("nan")
    with pytest.raises(InvalidOptionError, match="not finite"):
        pipe.acceleration.loras.load(state, "a")
    with pytest.raises(InvalidOptionError, match="did you mean 'weight_name'"):
        pipe.acceleration.loras.load(state_dict(pipe, "wan"), "a", weight_nam="x")
    pipe.acceleration.loras.load(state_dict(pipe, "wan"), "a")
    accelerate(pipe, None, attention="native", lora=False)
    assert "unloaded LoRAs: a" in pipe.acceleration.plan.notes and pipe.acceleration.loras.strengths == {}


def test_part_of_a_lora() -> None:
    pipe = attach(tiny.build("wan"))
    state = state_dict(pipe, "wan")
    part = {key: value for key, value in state.items() if ".attn1." in key}
    pipe.acceleration.loras.load(state, "a", layers="*.attn1.*")
    assert {row.layer.split(".")[2] for row in pipe.acceleration.loras.report} == {"attn1"}
    assert close(tiny.run(pipe, "wan"), peft_output("wan", {"a": (part, 1.0)}))


def test_the_second_expert() -> None:
    pipe = attach(tiny.build("wan22"))
    plain = tiny.run(pipe, "wan22")
    state = state_dict(pipe, "wan")
    pipe.acceleration.loras.load(state, "low", component="transformer_2")
    assert {row.component for row in pipe.acceleration.loras.report} == {"transformer_2"}
    assert not close(tiny.run(pipe, "wan22"), plain, 1e-3)
    pipe.acceleration.loras.unload()
    assert torch.equal(tiny.run(pipe, "wan22"), plain)


@pytest.mark.parametrize("alpha", [1.0, 6.0])
def test_alphas_of_the_file_count(alpha: float) -> None:
    pipe = tiny.build("flux")
    state = state_dict(pipe, "flux")
    for key in [key for key in state if key.endswith(".lora_A.weight")]:
        state[key.replace(".lora_A.weight", ".alpha")] = torch.tensor(alpha)
    attach(pipe).acceleration.loras.load(state, "a")
    assert close(tiny.run(pipe, "flux"), peft_output("flux", {"a": (state, 1.0)}))


def test_text_encoders_too() -> None:
    pipe = tiny.build("sd3")
    names = [n for n, m in pipe.text_encoder.named_modules() if n.endswith("q_proj")]
    generator = torch.Generator().manual_seed(0)
    state = state_dict(pipe, "sd3")
    for name in names:
        width = pipe.text_encoder.get_submodule(name).in_features
        state[f"text_encoder.{name}.lora_A.weight"] = torch.randn(2, width, generator=generator)
        state[f"text_encoder.{name}.lora_B.weight"] = torch.randn(width, 2, generator=generator)
    attach(pipe).acceleration.loras.load(state, "a")
    assert {row.component for row in pipe.acceleration.loras.report} == {"transformer", "text_encoder"}
    assert close(tiny.run(pipe, "sd3"), peft_output("sd3", {"a": (state, 1.0)}))


def test_no_new_graph_for_a_new_strength() -> None:
    pipe = attach(tiny.build("wan")).enable_compile(backend="eager", fullgraph=True)
    torch._dynamo.reset()
    pipe.acceleration.loras.load(state_dict(pipe, "wan"), "a", 0.5)
    half = tiny.run(pipe, "wan")
    with torch._dynamo.config.patch(error_on_recompile=True):
        pipe.acceleration.loras.set({"a": 1.0})
        assert not close(tiny.run(pipe, "wan"), half, 1e-2)
        pipe.acceleration.loras.set({"a": 0.5})
        assert torch.equal(tiny.run(pipe, "wan"), half)


def test_compiled_first_and_loaded_then() -> None:
    pipe = attach(tiny.build("wan")).enable_compile(backend="eager")
    plain = tiny.run(pipe, "wan")
    state = state_dict(pipe, "wan")
    pipe.acceleration.loras.load(state, "a")
    assert close(tiny.run(pipe, "wan"), peft_output("wan", {"a": (state, 1.0)}))
    pipe.acceleration.loras.unload()
    assert torch.equal(tiny.run(pipe, "wan"), plain)


def test_beside_diffusers_own() -> None:
    """Its LoRAs go on working on an accelerated pipeline; both kinds on one model are refused."""
    pipe = attach(tiny.build("flux"))
    state = state_dict(pipe, "flux")
    pipe.load_lora_weights(dict(state), adapter_name="own")
    assert close(tiny.run(pipe, "flux"), peft_output("flux", {"own": (state, 1.0)}))
    with pytest.raises(IncompatibleError, match="unload_lora_weights"):
        pipe.acceleration.loras.load(state, "a")
    assert pipe.acceleration.loras.strengths == {}


def test_with_a_cache_and_in_a_running_call() -> None:
    """A change of strength reaches the very next run, also through a cache; inside a run it is refused."""
    options = {"cache": "first_block", "cache_threshold": 0.3, "cache_min_steps": 0}
    pipe = accelerate(tiny.build("flux"), None, **options)
    state = state_dict(pipe, "flux", size=0.1)
    tiny.run(pipe, "flux")
    pipe.acceleration.loras.load(state, "a", 0.5)
    fresh = accelerate(tiny.build("flux"), None, **options)
    fresh.acceleration.loras.load(state, "a", 0.5)
    assert torch.equal(tiny.run(pipe, "flux"), tiny.run(fresh, "flux"))

    def change(own: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        pipe.acceleration.loras.set({"a": 1.0})
        return kwargs

    with pytest.raises(IncompatibleError, match="running call"):
        tiny.run(pipe, "flux", callback_on_step_end=change)
    assert torch.equal(tiny.run(pipe, "flux"), tiny.run(fresh, "flux"))
