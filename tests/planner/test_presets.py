"""Presets by GPU, presets of third parties, and what "auto" picks."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from diffaccel import InvalidOptionError, UnsupportedModelError, accelerate, plan, presets, restore
from diffaccel.ledger.hardware import HARDWARE, Hardware, named
from diffaccel.planner.options import validate
from diffaccel.planner.presets import bundled, load, parse
from diffaccel.planner.presets.fitting import fit, machine
from tests import tiny

GPU = ("3060-flux", "4090-flux", "4090-wan", "5090-flux", "h100-flux", "h100-wan")


@pytest.fixture(scope="module")
def pipes() -> dict[str, Any]:
    return {family: tiny.build(family) for family in ("flux", "wan", "sdxl", "sd3")}


# ---- the bundled ones -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GPU)
def test_presets_by_gpu(name: str, pipes: dict[str, Any]) -> None:
    """Each says what it is for, that we did not run it, and resolves on its family as "auto" does there."""
    text = presets(name)
    assert text.startswith("#") and "Not run on a GPU by us" in " ".join(text.replace("#", " ").split())
    preset = parse(text, name)
    hardware, family = name.split("-")
    assert preset.families == (family,) and preset.hardware == hardware and hardware in HARDWARE
    assert validate(preset.wishes)
    assert {"cache", "attention"} <= set(preset.wishes) and preset.level == "balanced"
    by_name = plan(pipes[family], name, hardware=hardware)
    by_auto = plan(pipes[family], hardware=hardware)
    assert by_auto.preset == f"auto ({name})" and by_auto.items == by_name.items
    assert all("computed" in note for note in by_name.notes)
    assert "cache.adaptive" in by_name.enabled and by_name.level == "balanced"
    assert all(item.reason for item in by_name.items if item.status != "enabled")
    with pytest.raises(UnsupportedModelError, match=rf"{family}.*sdxl"):
        plan(pipes["sdxl"], name)


def test_every_bundled_wish_is_known() -> None:
    for name in bundled():
        preset = load(name)
        validate(preset.wishes)
        for kind in ("cpu", "cuda"):
            fitted = fit(preset, name, "flux", Hardware("x", kind))
            assert validate(fitted.wishes) == fitted.wishes


def test_a_preset_on_another_machine_says_so(pipes: dict[str, Any]) -> None:
    decided = plan(pipes["flux"], "h100-flux")
    assert decided.notes[0] == "made for h100, but this is cpu"
    assert "compile" not in [item.name for item in decided.items] and "compile=False" in decided.notes[1]


# ---- auto -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "hardware", "preset"),
    [
        ("flux", "4090", "auto (4090-flux)"),
        ("wan", "RTX 4090", "auto (4090-wan)"),
        ("wan", "h100", "auto (h100-wan)"),
        ("wan", "3060", "auto"),
        ("flux", "5090", "auto (5090-flux)"),
        ("flux", "cpu", "auto"),
        ("sd3", "4090", "auto"),
        ("sdxl", "h100", "auto"),
    ],
)
def test_auto_picks_by_family_and_device(family: str, hardware: str, preset: str, pipes: dict[str, Any]) -> None:
    decided = plan(pipes[family], hardware=hardware)
    assert decided.preset == preset
    assert decided.items and all(item.reason for item in decided.items if item.status != "enabled")


@pytest.mark.parametrize(
    ("model", "name", "hardware"),
    [
        ("qwen-image", "l40s-qwen", "l40s"),
        ("hunyuanvideo", "a100-hunyuan", "a100"),
        ("flux.1-dev", "8gb-flux", Hardware("RTX 3070", "cuda", 7.8, (8, 6))),
        ("wan2.1-t2v-14b", "16gb-wan", Hardware("RTX 4080", "cuda", 16, (8, 9))),
    ],
)
def test_auto_picks_by_what_a_preset_says_it_is_for(model: str, name: str, hardware: Any) -> None:
    decided = plan(model, hardware=hardware)
    assert decided.preset == f"auto ({name})" and "cache.adaptive" in decided.enabled
    assert {item.status for item in decided.items} <= {"enabled", "skipped"} and "short" not in decided.notes[-1]
    assert "Not run on a GPU by us" in " ".join(presets(name).replace("#", " ").split())


def test_a_card_of_another_memory_gets_the_general_preset(pipes: dict[str, Any]) -> None:
    assert plan(pipes["wan"], hardware=Hardware("RTX 4070", "cuda", 12, (8, 9))).preset == "auto"
    assert plan(pipes["flux"], hardware=Hardware("M2", "mps", 8)).preset == "auto", "its memory is the host's"


def test_the_cpu_preset_is_for_any_model(pipes: dict[str, Any]) -> None:
    for family in ("sdxl", "wan"):
        assert plan(pipes[family], "cpu").enabled == ("cache.adaptive",)


def test_published_figures_have_a_source() -> None:
    for name in bundled():
        for item, row in load(name).published.items():
            assert row["source"] and row["what"] and float(str(row["gain"])) > 1, (name, item)
    with pytest.raises(InvalidOptionError, match="needs a gain and its source"):
        parse("[published.compile]\ngain = 2", "mine")
    with pytest.raises(InvalidOptionError, match=r"gain='2' must be a number"):
        parse("[published.compile]\ngain = '2'\nsource = 'x'", "mine")


def test_a_unet_and_an_unknown_model_get_reasons(pipes: dict[str, Any]) -> None:
    decided = plan(pipes["sdxl"], hardware="4090")
    assert "U-Net" in decided.item("compile").reason and "cache.adaptive" in decided.enabled
    assert "U-Net" in plan(pipes["sdxl"], hardware="4090", cache="first_block").item("cache.first_block").reason
    pipe = tiny.build("sdxl")
    pipe.unet.__class__ = type("Strange", (type(pipe.unet),), {})
    decided = plan(pipe, hardware="h100")
    assert decided.preset == "auto" and decided.family == "unknown"
    assert "Strange" in decided.item("compile").reason and "cache.adaptive" in decided.enabled, "it needs no blocks"
    assert "Strange" in plan(pipe, hardware="h100", cache="first_block").item("cache.first_block").reason


def test_auto_on_a_cpu_leaves_compile_off_unless_asked(pipes: dict[str, Any]) -> None:
    decided = plan(pipes["flux"])
    assert "compile" not in decided.enabled and "compile=False" in decided.notes[0]
    asked = plan(pipes["flux"], compile=True, compile_backend="eager")
    assert "compile" in asked.enabled and not any("compile=False" in note for note in asked.notes)


def test_overrides_lie_on_top_of_what_auto_picks(pipes: dict[str, Any]) -> None:
    decided = plan(pipes["flux"], hardware="4090", cache_tolerance=0.2, compile=None)
    assert decided.item("cache.adaptive").params["tolerance"] == 0.2
    assert "compile" not in [item.name for item in decided.items]


@pytest.mark.parametrize(
    ("device", "short"),
    [
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 3060", "3060"),
        ("NVIDIA GeForce RTX 3060 Ti", None),  # 8 GiB
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),  # 16 GiB
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GH200 480GB", None),
        ("cpu", "cpu"),
    ],
)
def test_names_of_real_devices(device: str, short: str | None) -> None:
    assert machine(Hardware(device, "cuda")) == short


def test_short_names_are_their_own() -> None:
    assert all(machine(named(name)) == name for name in HARDWARE)


def test_a_plan_from_auto_is_a_preset(pipes: dict[str, Any]) -> None:
    decided = plan(pipes["wan"], hardware="4090", compile_backend="eager")
    again = plan(pipes["wan"], decided, hardware="4090")
    assert again.enabled == decided.enabled == ("compile", "vae.tiling", "attention.sage", "cache.adaptive")
    assert again.preset == "auto (4090-wan)"
    assert again.item("cache.adaptive").params == decided.item("cache.adaptive").params


# ---- third parties --------------------------------------------------------------------------------------

MINE = '# mine\ndescription = "mine"\n[wishes]\ncache = "first_block"\ncache_threshold = 0.17\n'
MODULE = f"""
loaded = True
text = {MINE!r}
def make(): return text.replace("0.17", "0.18")
def fail(): raise RuntimeError("no licence")
number = 3
"""


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a distribution that announces the given entry points, with its package."""

    def install(entries: str) -> None:
        info = tmp_path / "acme_presets-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-presets\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[diffaccel.presets]\n{entries}\n")
        package = tmp_path / "acme_presets"
        (package / "data").mkdir(parents=True)
        (package / "__init__.py").write_text(MODULE)
        (package / "data" / "mine.toml").write_text(MINE)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "acme_presets", raising=False)

    yield install
    sys.modules.pop("acme_presets", None)


@pytest.mark.parametrize(
    ("target", "threshold"),
    [("acme_presets:data/mine.toml", 0.17), ("acme_presets:make", 0.18), ("acme_presets:text", 0.17)],
)
def test_a_third_partys_preset(target: str, threshold: float, third_party: Any, pipes: dict[str, Any]) -> None:
    third_party(f"acme = {target}")
    plan(pipes["flux"], "cpu-demo")
    plan(pipes["flux"])
    assert "acme_presets" not in sys.modules, "imported though nobody named it"
    assert "acme" in presets() and "# mine" in presets("acme")
    pipe = tiny.build("flux")
    accelerate(pipe, "acme")
    assert pipe.acceleration.plan.preset == "acme"
    assert pipe.acceleration.plan.item("cache.first_block").params["threshold"] == threshold
    restore(pipe)


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("acme_presets:fail", "no licence"),
        ("acme_presets:number", "must be TOML text"),
        ("acme_presets:missing", "missing"),
        ("acme_presets:data/none.toml", "none.toml"),
        ("no_such_package:x", "no_such_package"),
    ],
)
def test_a_broken_one_is_named_and_not_fatal(target: str, cause: str, third_party: Any, pipes: dict[str, Any]) -> None:
    third_party(f"good = acme_presets:text\nbroken = {target}")
    with pytest.warns(UserWarning, match=rf"'broken' of acme-presets.*{cause}"):
        found = presets()
    assert "good" in found and "broken" not in found and "4090-flux" in found
    with pytest.raises(InvalidOptionError, match=rf"'broken' of acme-presets.*{cause}"):
        presets("broken")
    with pytest.raises(InvalidOptionError, match="broken"):
        plan(pipes["flux"], "broken")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan(pipes["flux"], "good").item("cache.first_block").params["threshold"] == 0.17


def test_auto_takes_a_third_partys_and_passes_over_a_broken_one(third_party: Any, pipes: dict[str, Any]) -> None:
    third_party("l40s-flux = acme_presets:text\nl40s-wan = acme_presets:fail\n4090-flux = acme_presets:fail")
    assert plan(pipes["flux"], hardware="l40s").preset == "auto (l40s-flux)"
    assert plan(pipes["flux"], hardware="4090").preset == "auto (4090-flux)", "a bundled one keeps its name"
    decided = plan(pipes["wan"], hardware="l40s")
    assert decided.preset == "auto" and "l40s-wan" in decided.notes[0] and "no licence" in decided.notes[0]


# ---- the format -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("hardwear = '4090'", "hardware"),
        ("[on.gpu]\nwishes = {}", "cuda"),
        ("[on.cpu]\nwish = {}", "wishes"),
        ("on = 3", "table"),
        ("[on]\ncpu = 1", "table"),
    ],
)
def test_unknown_keys(text: str, meant: str) -> None:
    with pytest.raises(InvalidOptionError, match=meant):
        parse(text, "mine")


def test_switching_a_place_off_takes_its_numbers_along() -> None:
    preset = parse("[wishes]\ncache='first_block'\ncache_threshold=0.1\n[on.cpu]\nwishes={cache=false}", "mine")
    fitted = fit(preset, "mine", "flux", named("cpu"))
    assert fitted.wishes == {"cache": False} and preset.wishes["cache_threshold"] == 0.1
    assert validate(fitted.wishes) == {"cache": False}
    assert fit(preset, "mine", "flux", named("4090")) == preset


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("wishes = 3", "wishes=3 must be a table of names and values, got int"),
        ("wishes = 'ab'", "wishes='ab' must be a table of names and values, got str"),
        ("families = 'flux'", "families='flux' must be a list, got str"),
        ("families = 3", "families=3 must be a list, got int"),
        ("families = [3]", "families=[3] must hold names of families"),
        ("description = 3", "description=3 must be text, got int"),
        ("hardware = 3", "hardware=3 must be text, got int"),
        ("fidelity = 3", "fidelity=3 must be text, got int"),
        ("fidelity = 'exat'", "did you mean 'exact'"),
        ("[on.cpu]\nwishes = 3", "on.cpu: wishes=3 must be a table of names and values, got int"),
        ("[on.cpu]\nwhy = 3", "on.cpu: why=3 must be text, got int"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(source: str, words: str) -> None:
    with pytest.raises(InvalidOptionError) as error:
        parse(source, "mine")
    assert words in str(error.value) and "preset 'mine'" in str(error.value) and len(str(error.value)) <= 300
