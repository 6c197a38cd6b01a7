"""The guard: finite output, and the comparison with the original weights; both name the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import accelerate, restore
from diffaccel.errors import DiffaccelError
from diffaccel.quantization.guard import channel_shift, finite
from diffaccel.quantization.weights import ScaledWeight
from tests import tiny

BAD = "transformer_blocks.1.ff.net.2"


@pytest.fixture
def pipe() -> Any:
    return tiny.build("flux")


def _plant(pipe: Any, value: float) -> None:
    weight = pipe.transformer.get_submodule(BAD).weight
    assert isinstance(weight, ScaledWeight)
    weight.scale.mul_(value)


def test_a_layer_that_makes_nans_is_named(pipe: Any) -> None:
    plain = tiny.run(pipe, "flux")
    accelerate(pipe, None, quantization="fp8", strict=True)
    _plant(pipe, float("nan"))
    for _ in range(2):
        with pytest.raises(DiffaccelError, match=BAD.replace(".", r"\.")):
            tiny.run(pipe, "flux")
        root = next(iter(pipe.acceleration.stack.roots.values()))
        assert root.listeners == (), "nothing of the failed run stays"
    assert not any(m._forward_hooks for m in pipe.transformer.modules())
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "flux"), plain)


def test_off_means_off(pipe: Any) -> None:
    accelerate(pipe, None, quantization="fp8", quantization_guard="off", strict=True)
    _plant(pipe, float("nan"))
    assert not finite(tiny.run(pipe, "flux"))


def test_a_model_that_makes_nans_by_itself_is_said_to(pipe: Any) -> None:
    accelerate(pipe, None, quantization="fp8", strict=True)
    with torch.no_grad():
        pipe.transformer.proj_out.bias.fill_(float("nan"))
    with pytest.raises(DiffaccelError, match="no quantized layer made it so"):
        tiny.run(pipe, "flux")
    accelerate(pipe, None, quantization="fp8", strict=True)
    latents = torch.full((1, 16, 16), float("nan"))
    with pytest.raises(DiffaccelError, match="was called with values that are not finite"):
        tiny.run(pipe, "flux", latents=latents)


def test_colours_that_move_name_the_worst_layer(pipe: Any) -> None:
    accelerate(pipe, None, quantization="int8", compile=False, quantization_guard="reference", strict=True)
    good = tiny.run(pipe, "flux")
    measured = pipe.acceleration.plan.items[0].measured
    assert measured is not None and measured["channel_shift"] < 0.1 and not pipe.acceleration.report.notes
    assert torch.equal(tiny.run(pipe, "flux"), good), "the comparison changes nothing"
    _plant(pipe, 40.0)
    tiny.run(pipe, "flux")
    note = " ".join(pipe.acceleration.report.notes)
    assert BAD in note and "colours may shift" in note
    measured = pipe.acceleration.plan.items[0].measured
    assert (
        measured is not None
        and measured["worst_layer"] == BAD
        and measured["worst_error"] == pytest.approx(39, rel=0.1)
    )


def test_compiled_blocks_are_looked_into_without_compiling(pipe: Any) -> None:
    torch._dynamo.reset()
    accelerate(pipe, None, quantization="fp8", compile=True, compile_backend="eager", strict=True)
    _plant(pipe, float("nan"))
    with pytest.raises(DiffaccelError, match=BAD.replace(".", r"\.")):
        tiny.run(pipe, "flux")


def test_channel_shift_in_units_of_the_spread() -> None:
    reference = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5.0, 0.1])
    moved = reference + torch.tensor([0.5, 0.0, 0.05])
    assert torch.allclose(channel_shift(reference, moved), torch.tensor([0.5, 0.0, 0.5]), atol=0.03)
    video = reference.reshape(1, 1000, 1, 3).movedim(-1, 1)
    assert torch.allclose(channel_shift(video, video + 1, axis=1), torch.tensor([1, 0.2, 10.0]), rtol=0.05)
