"""Names that there are not: one short sentence with the name that was meant, whatever the slip of the pen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diffaccel import Budget, InvalidOptionError, accelerate, attach, plan, presets
from diffaccel.errors import closest, few, nearest
from diffaccel.ledger.hardware import HARDWARE, named
from diffaccel.pipeline import accelerated_class, cache_verb_name
from diffaccel.planner.levers import PLACES
from diffaccel.planner.options import override_keys, parameter_names, validate
from tests import tiny

SLIPS: dict[str, Callable[[str], str]] = {
    "a letter dropped": lambda name: name[: len(name) // 2] + name[len(name) // 2 + 1 :],
    "a letter doubled": lambda name: name[:-2] + name[-2] + name[-2:],
    "two letters swapped": lambda name: name[:-3] + name[-2] + name[-3] + name[-1],
    "another case": str.title,
    "no separators": lambda name: name.replace("_", ""),
    "dashes": lambda name: name.replace("_", "-"),
    "a plural": lambda name: name + "s",
    "the last letter missing": lambda name: name[:-1],
    "a word too many": lambda name: name + "_value",
}


def slips(name: str, taken: list[str]) -> Iterator[str]:
    """The misspellings of a name that are not names themselves."""
    for slip in SLIPS.values():
        wrong = slip(name)
        if wrong not in taken and len(wrong) > 2:
            yield wrong


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The sentence of the error that a call raises, short as all are."""
    with pytest.raises(InvalidOptionError) as error:
        call(*args, **kwargs)
    said = str(error.value)
    assert len(said) <= 300, said
    assert "''" not in said.replace(" ''", "").replace("=''", "") and "\"'" not in said, said
    return said


@pytest.fixture(scope="module")
def pipe() -> Any:
    return attach(tiny.build("flux"))


VALUES = [(place.key, value) for place in PLACES.values() for value in place.ready if value not in (False, None)]


@pytest.mark.parametrize(("key", "value"), VALUES)
def test_every_option_of_every_value(key: str, value: str | bool) -> None:
    """Every parameter, as an override: the right name is in the sentence."""
    names = parameter_names(PLACES[key], value)
    for name in names:
        option = PLACES[key].prefix + name
        for wrong in slips(option, [PLACES[key].prefix + other for other in names]):
            if key in ("lora",) or (not wrong.startswith(PLACES[key].prefix) and wrong in PLACES):
                continue
            said = refusal(validate, {key: value, wrong: 1})
            assert repr(option) in said or f" {option}," in said, said


VERBS = {
    "enable_sage_attention": ("attention", "sage"),
    "enable_sparse_attention": ("attention", "sparse_auto"),
    "enable_fp8": ("quantization", "fp8"),
    "enable_int8": ("quantization", "int8"),
    "enable_svdquant": ("quantization", "svdquant"),
    "enable_layerwise_offload": ("offload", "layerwise"),
    "enable_stage_offload": ("offload", "stage"),
    "enable_compile": ("compile", True),
    "enable_guidance_cache": ("guidance", "reuse"),
    "enable_solver": ("solver", "abm"),
    "enable_vae_tiling": ("vae_tiling", "blended"),
    **{cache_verb_name(str(value)): ("cache", value) for value in PLACES["cache"].ready},
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_keyword_of_every_verb(pipe: Any, verb: str) -> None:
    """In a verb the sentence speaks of the keyword as it was written."""
    key, value = VERBS[verb]
    names = parameter_names(PLACES[key], value)
    before = pipe.acceleration.plan
    for name in names:
        for wrong in slips(name, [*names, "method", "exact"]):
            said = refusal(getattr(pipe, verb), **{wrong: 1})
            assert repr(wrong) in said and (repr(name) in said or f" {name}" in said), said
    assert pipe.acceleration.plan == before


def test_every_verb_with_keywords_is_walked(pipe: Any) -> None:
    """A verb that is added later, and takes keywords, belongs into the table above."""
    verbs = [name for name in dir(type(pipe)) if name.startswith("enable_")]
    ours = [verb for verb in verbs if getattr(getattr(type(pipe), verb), "__module__", "") == "diffaccel.pipeline"]
    walked = {*VERBS, "enable_attention", "enable_cache"}  # these two name their arguments
    assert set(ours) <= walked, set(ours) - walked


@pytest.mark.parametrize(
    ("verb", "wrong", "right"),
    [
        ("enable_first_block_cache", "treshold", "threshold"),
        ("enable_first_block_cache", "rdt", "threshold"),
        ("enable_first_block_cache", "residual_diff_threshold", "threshold"),
        ("enable_teacache", "rel_l1_thresh", "threshold"),
        ("enable_teacache", "coeficients", "coefficients"),
        ("enable_magcache", "max_skip_steps", "max_steps"),
        ("enable_dbcache", "front_block", "front_blocks"),
        ("enable_dbcache", "schedule", "steps_mask"),
        ("enable_step_schedule", "schedule", "steps"),
        ("enable_layerwise_offload", "resident_layer", "resident_layers"),
        ("enable_layerwise_offload", "max_memory", "max_bytes"),
        ("enable_stage_offload", "vram", "device_bytes"),
        ("enable_fp8", "granularty", "granularity"),
        ("enable_int8", "shceme", "scheme"),
        ("enable_svdquant", "ranks", "rank"),
        ("enable_sage_attention", "smoothk", "smooth_k"),
        ("enable_sparse_attention", "dencity", "density"),
        ("enable_compile", "full_graph", "fullgraph"),
        ("enable_guidance_cache", "intervall", "interval"),
        ("enable_vae_tiling", "tile_heigth", "tile_height"),
    ],
)
def test_a_keyword_of_a_verb(pipe: Any, verb: str, wrong: str, right: str) -> None:
    said = refusal(getattr(pipe, verb), **{wrong: 1})
    assert repr(wrong) in said and repr(right) in said, said
    assert f"cache_{right}" not in said, "in the words of the verb, not of accelerate"


@pytest.mark.parametrize(
    ("wishes", "right"),
    [
        ({"cache": "schedule", "cache_schedule": [0, 2]}, "cache_steps"),
        ({"cache": "first_block", "cache_treshold": 0.1}, "cache_threshold"),
        ({"cache": "first_block", "treshold": 0.1}, "cache_threshold"),
        ({"cache": "first_block", "threshold": 0.1}, "cache_threshold"),
        ({"cach": "first_block"}, "cache"),
        ({"atention": "native"}, "attention"),
        ({"quantisation": "int8"}, "quantization"),
        ({"quantize": "int8"}, "quantization"),
        ({"vae": "exact"}, "vae_tiling"),
        ({"cpu_offload": True}, "offload"),
        ({"memory": 16}, "budget"),
        ({"bugdet": 16}, "budget"),
        ({"hardwear": "4090"}, "hardware"),
        ({"stric": True}, "strict"),
        ({"offload": "stage", "offload_text_cache": 0}, "offload_text_cache_bytes"),
        ({"cache": "first_blok"}, "first_block"),
        ({"cache": "tea_cache"}, "teacache"),
        ({"attention": "sage_attention"}, "sage"),
        ({"quantization": "int_8"}, "int8"),
        ({"quantization": "svd_quant"}, "svdquant"),
        ({"offload": "layer_wise"}, "layerwise"),
        ({"vae_tiling": "exakt"}, "exact"),
        ({"cache": "first_block", "cache_branches": "frist"}, "first"),
        ({"cache": "interval", "cache_scope": "denoisr"}, "denoiser"),
        ({"cache": "first_block", "cache_interval": 2}, "cache_"),
    ],
)
def test_an_override(pipe: Any, wishes: dict[str, Any], right: str) -> None:
    for function in (accelerate, plan):
        assert right in refusal(function, pipe, None, **wishes)


@pytest.mark.parametrize("name", ["x" * 4000, "", " ", "a b c", "ü", "cache_" * 400])
def test_a_sentence_stays_short_with_any_name(pipe: Any, name: str) -> None:
    refusal(accelerate, pipe, None, **{name: 1})
    refusal(accelerate, pipe, name)
    refusal(accelerate, pipe, None, cache=name)
    refusal(accelerate, pipe, None, hardware=name)
    refusal(accelerate, pipe, None, cache="first_block", cache_branches=name)
    refusal(pipe.enable_first_block_cache, **{name or "?": 1})
    refusal(Budget, **{name or "?": 1})
    refusal(Budget, fidelity=name)


def test_a_preset_and_a_machine(pipe: Any) -> None:
    for name in presets():
        for wrong in slips(name, presets()):
            assert name in refusal(plan, pipe, wrong), wrong
    for name in HARDWARE:
        if len(name) > 3:
            assert name in refusal(named, name + "0"), name


def test_a_budget_that_is_a_number(pipe: Any) -> None:
    for function in (accelerate, plan):
        assert "Budget(memory_gib=16)" in refusal(function, pipe, budget=16)
        assert "Budget(memory_gib=" in refusal(function, pipe, budget="16GB")
        assert "Budget(memory_gib=" in refusal(function, pipe, budget={"memory": 16})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("memory", "memory_gib"), ("memory_gb", "memory_gib"), ("vram", "memory_gib"), ("psnr", "min_psnr_db"),
        ("seconds", "max_seconds"), ("fidelty", "fidelity"), ("max_memory", "memory_gib"),
    ],
)  # fmt: skip
def test_a_budget_of_another_word(wrong: str, right: str) -> None:
    assert f"Budget({right}=16)" in refusal(Budget, **{wrong: 16})


def test_a_budget_is_built_as_ever() -> None:
    import copy
    import pickle
    from dataclasses import replace

    budget = Budget(16.0, min_psnr_db=30)
    assert budget == Budget(memory_gib=16.0, min_psnr_db=30) == copy.deepcopy(budget)
    assert pickle.loads(pickle.dumps(budget)) == budget
    assert replace(budget, memory_gib=8).memory_gib == 8


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("enable_firstblock_cache", "enable_first_block_cache"),
        ("enable_tea_cache", "enable_teacache"),
        ("enable_offload", "enable_stage_offload"),
        ("enable_int_8", "enable_int8"),
        ("enable_sage", "enable_sage_attention"),
        ("enable_quantization", "disable_quantization"),
        ("disable_caches", "disable_cache"),
        ("disable_first_block_cache", "disable_cache"),
        ("enable_model_cpu_ofload", "enable_model_cpu_offload"),
    ],
)
def test_a_verb_that_there_is_not(pipe: Any, wrong: str, right: str) -> None:
    """The near name, in an AttributeError: `hasattr` and `getattr` with a default go on working."""
    said = refusal(getattr, pipe, wrong)
    assert right in said and wrong in said
    assert not hasattr(pipe, wrong) and getattr(pipe, wrong, 3) == 3


def test_every_verb_misspelt(pipe: Any) -> None:
    names = [name for name in dir(pipe) if name.startswith(("enable_", "disable_"))]
    assert len(names) > 30
    for name in names:
        for wrong in slips(name, names):
            if wrong.startswith(("enable_", "disable_")):
                assert repr(name) in refusal(getattr, pipe, wrong)


def test_other_attributes_are_diffusers_own_matter(pipe: Any) -> None:
    with pytest.raises(AttributeError) as error:
        pipe.transfromer  # noqa: B018
    assert not isinstance(error.value, InvalidOptionError)
    plain = tiny.build("flux")
    with pytest.raises(AttributeError) as before:
        plain.transfromer  # noqa: B018
    assert str(error.value) == str(before.value)
    assert "__getattr__" not in vars(accelerated_class(type(plain)))


# ---- the sentence --------------------------------------------------------------------------------------------------


def test_a_short_list_is_given_in_full_and_a_long_one_is_not() -> None:
    assert nearest("dsk", ["host", "disk"]) == "did you mean 'disk'? Allowed: disk, host"
    assert nearest("tape", ["host", "disk"]) == "Allowed: disk, host"
    assert nearest("x", []) == "Allowed: (none)"
    long = [
        f"option_{letter}_of"
        for letter in ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota")
    ]
    assert len(", ".join(long)) > 110
    assert nearest("option_alhpa_of", long) == "did you mean 'option_alpha_of'?"
    assert nearest("qqq", long).startswith("Allowed: option_alpha_of, option_beta_of") and "more" in nearest(
        "qqq", long
    )


def test_few() -> None:
    assert few(["a", "b"]) == "a, b"
    assert few([]) == ""
    assert few("abcdefg", most=7) == "a, b, c and 4 more"
    assert len(few(["y" * 500, "z"])) < 130


def test_what_is_near() -> None:
    assert closest("zzz", ["abc", "cache"]) == []
    assert closest("cache_step", ["cache_steps", "cache_min_steps", "cache_last_steps", "offload"])[0] == "cache_steps"
    assert "offload_text_cache_bytes" not in closest("cache_treshold", override_keys())[:1]


@pytest.mark.parametrize(
    ("given", "meant"),
    [("enable_guidance_reuse", "enable_guidance_cache"), ("disable_adaptive_cache", "disable_cache")],
)
def test_a_verb_is_answered_by_verbs_of_its_kind(given: str, meant: str) -> None:
    pipe = attach(tiny.build("flux"))
    with pytest.raises(InvalidOptionError, match=rf"'{meant}'|Allowed: .*\b{meant}\b") as caught:
        getattr(pipe, given)
    other = "disable_" if given.startswith("enable_") else "enable_"
    assert other not in str(caught.value).split(":", 1)[1]
