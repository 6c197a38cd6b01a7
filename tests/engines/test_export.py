"""Plans as commands: every word of a command is in the record of its engine, and what it cannot say is told."""

from __future__ import annotations

import ast
import json
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest

from diffaccel import InvalidOptionError, UnsupportedModelError
from diffaccel.cli import main
from diffaccel.engines import ENGINES, export, extras_of
from diffaccel.engines.record import Command, record
from diffaccel.engines.request import Request
from diffaccel.planner.levers import PLACES
from diffaccel.planner.plan import Plan, PlanItem

FLUX = Request("black-forest-labs/FLUX.1-dev", height=1024, width=1024, steps=28, heads=24)
WAN = Request(
    "Wan-AI/Wan2.1-T2V-14B-Diffusers", height=720, width=1280, frames=81, steps=50, guidance=5.0, branches=2, heads=40
)
COMMANDS = ("sglang", "vllm-omni", "xdit")


def plan_of(*items: tuple[str, dict[str, Any]], family: str = "flux", fidelity: str = "lossy") -> Plan:
    rows = [PlanItem(name, "call", "enabled", "", fidelity, params) for name, params in items]
    return Plan("made", "Pipeline", family, "h100 80 GiB", tuple(rows))


def every_item() -> list[str]:
    return [place.item(value) for place in PLACES.values() for value in place.values if value and value in place.ready]


def words(text: str, engine: str) -> tuple[dict[str, str], list[str]]:
    """(environment, words behind the program) of a command, as a shell reads it."""
    command = text.split("\n\n")[0]
    given = shlex.split(command.replace("\\\n", " "))
    environment = dict(word.split("=", 1) for word in given if re.match(r"[A-Z_]+=", word))
    rest = given[len(environment) :]
    program = record(ENGINES[engine]).data["program"]
    assert rest[: len(program)] == program
    return environment, rest[len(program) :]


def flags(text: str, engine: str) -> dict[str, str | None]:
    """Flag -> value of a command, checked against the record: names, kinds of values, choices."""
    environment, rest = words(text, engine)
    data = record(ENGINES[engine]).data
    assert set(environment) <= set(data["environment"])
    found: dict[str, str | None] = {}
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            assert not found, f"{word} stands alone"  # the verb, and the model of vLLM-Omni
            continue
        kind = data["arguments"][word]
        found[word] = None if kind["takes"] == "switch" else rest.pop(0)
        if kind["takes"] == "boolean":
            assert found[word] in ("true", "false")
        assert found[word] in kind.get("choices", [found[word]])
    return found


# ---- records -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", COMMANDS)
def test_a_record_names_its_sources(engine: str) -> None:
    data = record(ENGINES[engine]).data
    assert data["version"] and data["recorded"] >= "2026-12-01"
    assert all(re.fullmatch(r"[0-9a-f]{40}", source["commit"]) for source in data["sources"])
    entries = [*data["arguments"].values(), *data["environment"].values()]
    assert {entry["source"] for entry in entries} <= set(range(len(data["sources"])))
    assert {entry["takes"] for entry in data["arguments"].values()} <= {"value", "boolean", "switch"}
    assert len(record(ENGINES[engine]).sources) == len(data["sources"])


def test_today_s_arguments_are_recorded() -> None:
    sglang, omni, xdit = (record(ENGINES[engine]).data["arguments"] for engine in COMMANDS)
    assert {"--performance-mode", "--progressive-mode", "--batching-mode", "--kv-cache-quant"} <= set(sglang)
    assert {"--vae-fast-path", "--cache-backend", "--step-execution", "--diffusion-kv-cache-dtype"} <= set(omni)
    assert {"--pipefusion_parallel_degree", "--ulysses_degree", "--use_fbcache", "--use_parallel_vae"} <= set(xdit)


def test_a_command_says_nothing_that_is_not_recorded() -> None:
    command = Command(record("sglang"), "generate")
    for wrong in (
        lambda: command.add("--steps", 4),
        lambda: command.add("--save-output", "yes"),
        lambda: command.add("--seed"),
        lambda: command.add("--performance-mode", "fast"),
        lambda: command.set("SGLANG_FAST", 1),
    ):
        with pytest.raises(LookupError):
            wrong()
    command.add("--prompt", "a cat's; rm -rf")
    assert words(str(command), "sglang")[1] == ["generate", "--prompt", "a cat's; rm -rf"]


# ---- every item, every engine --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_every_item_is_said_or_told(engine: str) -> None:
    for name in every_item():
        for family, request_ in (("flux", FLUX), ("wan", WAN)):
            check_item(engine, request_, family, name)


def check_item(engine: str, request_: Request, family: str, name: str) -> None:
    made = export(plan_of((name, {}), family=family), engine, request_)
    [row] = made.rows
    assert row.item == name and row.how in ("same", "near", "not")
    assert row.how == "same" or row.why  # what differs is said
    bare = export(plan_of(family=family), engine, request_)
    if row.how == "not":
        assert made.cannot == (row,) and f"# CANNOT SAY {name}: {row.why}" in str(made)
        if not name.startswith(("compile", "offload")):
            assert made.text == bare.text
    elif not (name == "attention.auto" or (engine == "vllm-omni" and name == "compile")):
        assert made.text != bare.text
    if engine == "diffusers":
        ast.parse(made.text)
    else:
        flags(made.text, engine)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_exact_strips_are_no_blended_tiles(engine: str) -> None:
    made = export(plan_of(("vae.tiling", {}), fidelity="equivalent"), engine, FLUX)
    assert [row.item for row in made.cannot] == ["vae.tiling"] and "tiling" not in made.text


def test_items_that_are_off_are_not_said() -> None:
    plan = plan_of(("compile", {}))
    off = replace(plan, items=(replace(plan.items[0], status="skipped"),))
    assert export(off, "sglang", FLUX) == export(plan_of(), "sglang", FLUX)


# ---- numbers -------------------------------------------------------------------------------------------------------


def test_sglang_gets_the_plan_s_numbers() -> None:
    cache = ("cache.dbcache", {"front_blocks": 4, "back_blocks": 1, "threshold": 0.12, "warmup_steps": 6, "order": 2})
    layers = ("offload.layerwise", {"resident_layers": 3, "prefetch": 2, "store": "host"})
    text = export(plan_of(cache, layers, ("attention.sage", {}), ("compile", {})), "sglang", FLUX).text
    environment, _ = words(text, "sglang")
    assert environment == {
        "SGLANG_CACHE_DIT_ENABLED": "true",
        "SGLANG_CACHE_DIT_FN": "4",
        "SGLANG_CACHE_DIT_BN": "1",
        "SGLANG_CACHE_DIT_WARMUP": "6",
        "SGLANG_CACHE_DIT_RDT": "0.12",
        "SGLANG_CACHE_DIT_TAYLORSEER": "true",
        "SGLANG_CACHE_DIT_TS_ORDER": "2",
    }
    found = flags(text, "sglang")
    assert found["--performance-mode"] == "manual" and found["--attention-backend"] == "sage_attn"
    assert (found["--dit-layerwise-resident-layers"], found["--dit-offload-prefetch-size"]) == ("3", "2")
    assert (found["--height"], found["--num-inference-steps"], found["--seed"]) == ("1024", "28", "0")
    assert flags(export(plan_of(), "sglang", FLUX).text, "sglang")["--performance-mode"] == "speed"


def test_vllm_omni_gets_the_plan_s_numbers() -> None:
    cache = ("cache.first_block", {"threshold": 0.1, "max_consecutive": 3})
    text = export(plan_of(cache, ("offload.layerwise", {"resident_layers": 3})), "vllm-omni", FLUX).text
    found = flags(text, "vllm-omni")
    settings = json.loads(str(found["--cache-config"]))
    assert found["--cache-backend"] == "cache_dit" and settings["residual_diff_threshold"] == 0.1
    assert settings["Fn_compute_blocks"] == 1 and settings["max_continuous_cached_steps"] == 3
    assert json.loads(str(found["--diffusion-offload-config"]))["layer_options"] == {"dit": {"resident_layers": 3}}
    assert "--enforce-eager" in found  # the plan does not compile
    call = shlex.split(text.split("\n\n")[1].replace("\\\n", " "))
    assert json.loads(call[-1])["num_inference_steps"] == 28


def test_degrees_share_out_the_gpus() -> None:
    four = replace(WAN, gpus=4)
    found = flags(export(plan_of(family="wan"), "sglang", four).text, "sglang")
    assert (found["--num-gpus"], found["--cfg-parallel-size"], found["--ulysses-degree"]) == ("4", "2", "2")
    found = flags(export(plan_of(family="wan"), "xdit", four).text, "xdit")
    assert found["--ulysses_degree"] == "4" and "--use_cfg_parallel" not in found  # its T2V runner has none
    both = replace(FLUX, gpus=8)
    found = flags(export(plan_of(), "xdit", both, {"pipefusion": "4", "parallel_vae": "true"}).text, "xdit")
    assert (found["--pipefusion_parallel_degree"], found["--ulysses_degree"]) == ("4", "2")
    with pytest.raises(InvalidOptionError, match="deals out 24 heads, which 5 does not divide"):
        export(plan_of(), "sglang", replace(FLUX, gpus=5))


# ---- what engines have besides -------------------------------------------------------------------------------------

GOOD = [
    (
        "sglang",
        FLUX,
        "flux",
        {"progressive": "0.05"},
        {"--progressive-mode": "dct_rewind", "--progressive-delta": "0.05"},
    ),
    ("sglang", replace(FLUX, serve=True), "flux", {"batch": "4"}, {"--batching-mode": "continuous"}),
    ("sglang", replace(WAN, model="robbyant/lingbot-world"), "wan", {"kv": "int4"}, {"--kv-cache-quant": "int4"}),
    (
        "sglang",
        FLUX,
        "flux",
        {"modelopt": "fp8"},
        {"--transformer-path": "lmsys/flux1-dev-modelopt-fp8-sglang-transformer"},
    ),
    ("vllm-omni", WAN, "wan", {"vae_fast_path": "channels_last"}, {"--vae-fast-path": "channels_last"}),
    ("vllm-omni", FLUX, "flux", {"inter_request": "16"}, {"--cache-backend": "inter_request"}),
    ("vllm-omni", FLUX, "flux", {"batch": "4"}, {"--max-num-seqs": "4", "--step-execution": None}),
    ("vllm-omni", FLUX, "flux", {"kv": "fp8"}, {"--diffusion-kv-cache-dtype": "fp8"}),
    ("xdit", replace(FLUX, gpus=2), "flux", {"shard": "2"}, {"--fully_shard_degree": "2"}),
]


@pytest.mark.parametrize(("engine", "request_", "family", "extras", "expected"), GOOD)
def test_extras(engine: str, request_: Request, family: str, extras: Any, expected: dict[str, str | None]) -> None:
    found = flags(export(plan_of(family=family), engine, request_, extras).text, engine)
    assert expected.items() <= found.items()
    assert not expected.items() & flags(export(plan_of(family=family), engine, request_).text, engine).items()


def test_pipefusion_of_vllm_omni_is_a_script() -> None:
    text = export(plan_of(family="wan"), "vllm-omni", WAN, {"pipefusion": "4"}).text
    calls = {ast.unparse(call.func): call for call in ast.walk(ast.parse(text)) if isinstance(call, ast.Call)}
    engine = {keyword.arg: ast.literal_eval(keyword.value) for keyword in calls["Omni"].keywords}
    assert engine == {"model": WAN.model, "pipeline_parallel_size": 4, "enable_pipefusion": True}
    known = record("vllm_omni").data["omni"]["sampling"]
    assert {keyword.arg for keyword in calls["OmniDiffusionSamplingParams"].keywords} <= set(known)


CACHED, COMPILED, STAGED = ("cache.first_block", {}), ("compile", {}), ("offload.stage", {})
BAD = [
    ("sglang", FLUX, (COMPILED,), {"progressive": "0.05"}, "refuses it together with compile"),
    ("sglang", replace(FLUX, gpus=2), (), {"progressive": "0.05"}, "one GPU only"),
    ("sglang", FLUX, (), {"progressive": "none"}, "must be a number above 0"),
    ("sglang", replace(FLUX, serve=True), (CACHED,), {"batch": "4"}, "excludes cache.first_block"),
    ("sglang", FLUX, (), {"batch": "4"}, "give --serve"),
    ("sglang", FLUX, (), {"kv": "int4"}, "LingBot World alone"),
    ("sglang", FLUX, (STAGED,), {"modelopt": "fp8"}, "wants the transformer on the GPU"),
    ("sglang", FLUX, (), {"modelopt": "int3"}, "must be fp8 or nvfp4"),
    ("sglang", FLUX, (), {"progresive": "1"}, "did you mean 'progressive'"),
    ("vllm-omni", FLUX, (), {"vae_fast_path": "lossless"}, "for the VAE of Wan"),
    ("vllm-omni", FLUX, (CACHED,), {"batch": "4"}, "excludes caches from step execution"),
    ("vllm-omni", FLUX, (), {"pipefusion": "1"}, "at least 2 stages"),
    ("xdit", WAN, (), {"pipefusion": "2"}, "has it for other models"),
    ("xdit", FLUX, (), {"shard": "two"}, "must be a number above 0"),
]


@pytest.mark.parametrize(("engine", "request_", "items", "extras", "said"), BAD)
def test_refusals(engine: str, request_: Request, items: Any, extras: Any, said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said) as caught:
        export(plan_of(*items), engine, request_, extras)
    assert len(str(caught.value)) <= 300


def test_unknown_engines_and_models() -> None:
    with pytest.raises(InvalidOptionError, match="unknown engine 'sglan': did you mean 'sglang'"):
        export(plan_of(), "sglan", FLUX)
    with pytest.raises(UnsupportedModelError, match="xDiT's runner does not know genmo/mochi-1-preview"):
        export(plan_of(), "xdit", replace(FLUX, model="genmo/mochi-1-preview"))
    assert extras_of("diffusers") == {}


# ---- the verb ------------------------------------------------------------------------------------------------------


def test_the_verb_plans_and_writes(tmp_path: Any, capsys: Any) -> None:
    words_ = ["export", "flux.1-dev", "--engine", "sglang", "--hardware", "4090", "--also", "modelopt=fp8"]
    assert main([*words_, "--preset", "4090-flux", "--size", "512x768"]) == 1  # offload="stage" and the checkpoint
    assert "modelopt=fp8 wants the transformer on the GPU" in capsys.readouterr().err
    file = tmp_path / "run.sh"
    assert main([*words_[:6], "--size", "512x768", "--out", str(file)]) == 0
    said = capsys.readouterr()
    assert said.out == file.read_text() and "# CANNOT SAY cache.adaptive" in said.out
    found = flags(said.out.split("\n", said.out.count("\n# ") + 1)[-1], "sglang")
    assert (found["--width"], found["--height"], found["--model-path"]) == ("512", "768", FLUX.model)
    assert "progressive: tolerance" in said.err
    assert main(["export", "flux.1-dev", "--engine", "sglang", "--also", "batch"]) == 1
    assert "must be NAME=VALUE" in capsys.readouterr().err
    assert main([*words_[:6], "--out", str(tmp_path / "none" / "run.sh")]) == 1
    assert "--out: there is no folder" in capsys.readouterr().err
