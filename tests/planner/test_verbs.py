"""The `enable_*` / `disable_*` verbs."""

from __future__ import annotations

import pytest

from diffaccel import InvalidOptionError, UnsupportedModelError, attach, restore
from tests import tiny


@pytest.fixture
def flux():  # type: ignore[no-untyped-def]
    pipe = attach(tiny.build("flux"))
    yield pipe
    restore(pipe)


def test_verbs_return_the_pipe_and_reconfigure(flux) -> None:  # type: ignore[no-untyped-def]
    assert flux.enable_first_block_cache(threshold=0.2) is flux
    assert flux.acceleration.plan.enabled == ("cache.first_block",)
    flux.enable_first_block_cache(threshold=0.3, max_consecutive=2)
    item = flux.acceleration.plan.item("cache.first_block")
    assert item.params["threshold"] == 0.3 and item.params["max_consecutive"] == 2
    assert flux.enable_attention("flex") is flux
    assert flux.acceleration.plan.enabled == ("attention.flex", "cache.first_block")
    assert flux.enable_attention("native").acceleration.plan.enabled == ("attention.native", "cache.first_block")
    assert "took the place of attention.flex" in flux.acceleration.plan.notes[0]
    assert flux.disable_cache() is flux
    assert flux.acceleration.plan.enabled == ("attention.native",)
    assert flux.disable_attention().acceleration.plan.enabled == ()


def test_a_failing_verb_changes_nothing(flux) -> None:  # type: ignore[no-untyped-def]
    flux.enable_first_block_cache(threshold=0.2)
    handle = flux.acceleration
    for call in (
        lambda: flux.enable_first_block_cache(treshold=0.3),
        lambda: flux.enable_first_block_cache(threshold=-1),
        lambda: flux.enable_attention("flash"),
        lambda: flux.enable_attention("sage2"),
        lambda: flux.enable_step_schedule(),
        lambda: flux.enable_dbcache(front_blocks=0),
    ):
        with pytest.raises(InvalidOptionError):
            call()
    assert flux.acceleration is handle and handle.plan.enabled == ("cache.first_block",)


def test_verbs_say_why_they_cannot_act(flux) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidOptionError, match="gains nothing on a CPU"):
        flux.enable_sage_attention()
    with pytest.raises(UnsupportedModelError, match="nothing to gain"):
        flux.enable_sparse_attention()


def test_every_cache_has_a_verb(flux) -> None:  # type: ignore[no-untyped-def]
    for verb, parameters, name in (
        ("first_block_cache", {}, "first_block"),
        ("dbcache", {"front_blocks": 1}, "dbcache"),
        ("taylorseer", {}, "taylorseer"),
        ("teacache", {"coefficients": (1.0, 0.0), "threshold": 0.1}, "teacache"),
        ("magcache", {"ratios": (1.0, 0.9), "threshold": 0.1}, "magcache"),
        ("seacache", {}, "seacache"),
        ("easycache", {}, "easycache"),
        ("dicache", {}, "dicache"),
        ("interval_cache", {}, "interval"),
        ("step_schedule", {"steps": (0, 2, 4)}, "schedule"),
    ):
        assert getattr(flux, f"enable_{verb}")(**parameters) is flux
        assert flux.acceleration.plan.enabled == (f"cache.{name}",)
        assert parameters.items() <= flux.acceleration.plan.item(f"cache.{name}").params.items()


def test_verbs_that_lack_what_they_need(flux) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UnsupportedModelError, match=r"no calibrated coefficients.*FLUX\.1-dev"):
        flux.enable_teacache()
    with pytest.raises(UnsupportedModelError, match="no ratios"):
        flux.enable_magcache()
    with pytest.raises(InvalidOptionError, match="steps must name the computed steps"):
        flux.enable_step_schedule()
    assert flux.acceleration.plan.enabled == ()


def test_verbs_go_with_restore() -> None:
    pipe = tiny.build("flux")
    cls = type(pipe)
    attach(pipe)
    assert isinstance(pipe, cls) and type(pipe) is not cls and type(pipe).__name__ == "FluxPipeline"
    assert type(attach(tiny.build("flux"))) is type(pipe), "one shared subclass per class"
    restore(pipe)
    assert type(pipe) is cls and not hasattr(pipe, "acceleration") and not hasattr(pipe, "enable_attention")
    assert restore(pipe) is pipe, "a no-op on a pipe that is not accelerated"
