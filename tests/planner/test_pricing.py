"""What a plan says about gains, memory and budgets is what the ledger computes by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from diffaccel import Budget, Plan, accelerate, plan
from diffaccel.core.accelerator import Target
from diffaccel.core.unloaded import planning
from diffaccel.ledger import estimate
from diffaccel.ledger.hardware import Hardware, named
from diffaccel.models.registry import lookup
from diffaccel.planner import table
from diffaccel.planner.blueprint import pipeline_of
from diffaccel.planner.pricing import priced
from tests import tiny


@pytest.fixture(scope="module")
def flux() -> Plan:
    return plan("flux.1-dev", hardware="4090")


def test_gains_are_those_of_the_ledger(flux: Plan) -> None:
    stack = estimate("flux.1-dev", hardware="4090").apply(flux)
    gains = {row.name: row.gain for row in stack.rows}
    assert {item.name: item.predicted.get("gain") for item in flux.items if item.status == "enabled"} == {
        name: pytest.approx(gain, abs=6e-4) for name, gain in gains.items()
    }
    assert math.prod(gain or 1 for gain in gains.values()) == pytest.approx(stack.gain)
    assert f"({stack.gain:.2f} times as fast" in flux.notes[-2] and "28 steps on 4090" in flux.notes[-2]
    assert flux.notes[-1].startswith(f"memory, computed: {stack.last.need_gib:.1f} GiB of 24 on the device")


def test_three_origins_stand_side_by_side(flux: Plan) -> None:
    item = flux.item("quantization.fp8")
    assert item.published is not None and item.published["gain"] == 1.5
    both = flux.with_measured({"speed": 1.9, "psnr_db": 41.0})
    told = table.gain(both.item("quantization.fp8"))
    assert told.startswith(f"{item.predicted['gain']:.2f}x computed; 1.50x published (denoising); speed 1.9")
    assert told.endswith("(measured)") and "aredden/flux-fp8-api" in str(both)
    assert Plan.from_toml(both.to_toml()) == Plan.from_dict(both.to_dict()) == both


def test_a_plan_used_as_a_preset_keeps_what_is_published(flux: Plan) -> None:
    again = plan(tiny.build("flux"), flux, hardware="4090")
    assert again.item("compile").published == flux.item("compile").published
    assert plan(tiny.build("flux"), flux, hardware="4090", compile=None).item("quantization.fp8").published


@pytest.mark.parametrize("model", ["flux.1-dev", "wan2.1-t2v-14b", "hunyuanvideo"])
def test_the_table_is_at_most_120_columns_wide(model: str, flux: Plan) -> None:
    made = flux if model == "flux.1-dev" else plan(model, hardware="a100", budget=Budget(max_seconds=1))
    lines = str(made).splitlines()
    assert max(map(len, lines)) <= table.WIDTH and len(lines) > 5
    head = next(line for line in lines if line.strip().startswith("item"))
    assert head.split() == ["item", "state", "fidelity", "gain", "why", "/", "setting"]
    for item in made.items:  # no word is lost in wrapping
        assert (
            "".join(item.reason.split()) in "".join(part for line in lines for part in line.split()) or len(lines) > 9
        )


# ---- memory first --------------------------------------------------------------------------------------------


def card(gib: float, capability: tuple[int, int] = (8, 9)) -> Hardware:
    """A card that no preset is made for."""
    return Hardware(f"card of {gib:g}", "cuda", gib, capability, bf16_tflops=165.2, pcie=4)


@pytest.mark.parametrize(
    ("gib", "offload"),
    [(36, None), (35, "offload.stage"), (25, "offload.stage"), (23.9, "offload.layerwise")],
)
def test_what_is_exact_is_chosen_by_what_fits(gib: float, offload: str | None) -> None:
    """FLUX.1 in bf16: 33.5 GiB resident, 23.2 by stage, about 13 by layer, of 95 % of a card."""
    made = plan("flux.1-dev", hardware=card(gib), budget=Budget(fidelity="equivalent"))
    assert [name for name in made.enabled if name.startswith("offload")] == ([offload] if offload else [])
    notes = [note for note in made.notes if "not 'stage'" in note]
    assert len(notes) == (offload == "offload.layerwise")
    assert "short" not in made.notes[-1]


def test_what_was_asked_for_by_name_stays() -> None:
    made = plan("flux.1-dev", hardware=card(18), offload="stage")
    assert "offload.stage" in made.enabled and "GiB short; it would do with offload='layerwise'" in made.notes[-1]


def test_a_decode_that_does_not_fit_is_made_in_strips() -> None:
    made = plan("hunyuanvideo-1.5", hardware="h100")
    assert "vae.tiling" in made.enabled and any("vae_tiling='exact': a whole decode" in note for note in made.notes)
    exact = plan("hunyuanvideo-1.5", hardware="h100", budget=Budget(fidelity="exact"))
    assert "vae.tiling" not in exact.enabled and "GiB short" in exact.notes[-1]
    assert "vae.tiling" not in plan("hunyuanvideo-1.5", hardware="h100", vae_tiling=None).enabled


# ---- budgets -------------------------------------------------------------------------------------------------


def test_too_slow_says_by_how_much_and_what_would_do() -> None:
    asked = {"hardware": "h100", "preset": None}
    made = plan("flux.1-dev", budget=Budget(max_seconds=5, fidelity="equivalent"), **asked)
    plain = estimate("flux.1-dev", hardware="h100").apply([])
    over = plain.last.total - plain.last.decode - 5
    assert f"{over:.3g} s too long; it would do with compile=True" in made.notes[-1]
    assert "lossy" not in made.notes[-1] and "quantization" not in made.notes[-1]
    tight = plan("flux.1-dev", budget=Budget(max_seconds=0.5, fidelity="equivalent"), **asked).notes[-1]
    assert "too much: take fewer steps or a smaller size" in tight
    exact = plan("flux.1-dev", budget=Budget(max_seconds=1, fidelity="exact"), **asked).notes[-1]
    assert "no lever that 'exact' allows" in exact
    fine = plan("flux.1-dev", budget=Budget(max_seconds=30), **asked)
    assert not any("too long" in note for note in fine.notes)


def test_the_adaptive_cache_keeps_seconds_where_it_can() -> None:
    made = plan("flux.1-dev", hardware="h100", budget=Budget(max_seconds=2))
    stack = estimate("flux.1-dev", hardware="h100").apply(made)
    assert stack.last.total - stack.last.decode <= 2 and not any("too long" in note for note in made.notes)


# ---- where there is nothing to compute from ------------------------------------------------------------------


def test_on_a_machine_without_a_peak_gains_are_of_flops() -> None:
    made = plan(tiny.build("wan"))
    assert made.item("cache.adaptive").predicted["gain"] > 1
    assert not any("computed for" in note for note in made.notes)


def test_an_unknown_model_keeps_its_plan() -> None:
    pipe = tiny.build("flux")
    pipe.transformer.__class__ = type("Strange", (torch.nn.Module,), {})
    target = Target(pipe, lookup(pipe), named("4090"))
    made = Plan("x", "FluxPipeline", "unknown", "4090")
    assert priced(made, target) is made


def test_the_details_of_an_acceleration_say_what_is_computed() -> None:
    pipe: Any = accelerate(tiny.build("flux"), None, cache="adaptive")
    told = {what: value for _, what, value in pipe.acceleration.details.rows()}
    assert float(told["predicted gain"]) > 1 and "gain" not in pipe.acceleration.plan.items[0].predicted


# ---- work, counted -------------------------------------------------------------------------------------------


def test_no_weight_is_loaded_and_costs_make_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan from a name makes its modules once, on meta; what the ledger adds makes none and allocates nothing."""
    made = 0
    first = torch.nn.Module.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal made
        made += 1
        first(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__init__", counted)
    monkeypatch.setattr(torch, "load", None)
    monkeypatch.setattr("safetensors.safe_open", None)
    pipe, _ = pipeline_of("flux.1-dev")
    once = made
    assert once < 6000 and all(p.is_meta for p in pipe.transformer.parameters())
    decided = plan("flux.1-dev", hardware="4090")
    assert made == 2 * once, "no second copy"
    with planning():
        priced(decided, Target(pipe, lookup(pipe), named("4090")))
    assert made == 2 * once
