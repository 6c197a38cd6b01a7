"""FP8 and INT8 on live pipelines: what they do, what they say, what they refuse, and that undo leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from diffaccel import accelerate, attach, plan, restore
from diffaccel.errors import DiffaccelError, IncompatibleError, InvalidOptionError, UnsupportedModelError
from diffaccel.quantization.fp8_int8 import Fp8, Int8
from diffaccel.quantization.weights import ScaledWeight, weight_bytes
from tests import tiny
from tests.fingerprint import differences, snapshot_pipe

FAMILIES = ("flux", "sd3", "wan")
WISHES: dict[str, dict[str, Any]] = {
    "fp8 dynamic row": {"quantization": "fp8"},
    "fp8 dynamic tensor": {"quantization": "fp8", "quantization_granularity": "tensor"},
    "fp8 weight_only": {"quantization": "fp8", "quantization_scheme": "weight_only"},
    "fp8 storage": {"quantization": "fp8", "quantization_scheme": "storage"},
    "int8 dynamic": {"quantization": "int8"},
    "int8 weight_only": {"quantization": "int8", "quantization_scheme": "weight_only"},
}
PEERS: dict[str, dict[str, Any]] = {
    "torchao fp8": WISHES["fp8 weight_only"] | {"quantization_backend": "torchao"},
    "torchao int8 dynamic": WISHES["int8 dynamic"] | {"quantization_backend": "torchao"},
    "quanto fp8": WISHES["fp8 weight_only"] | {"quantization_backend": "quanto"},
    "quanto int8": WISHES["int8 weight_only"] | {"quantization_backend": "quanto"},
}


@pytest.fixture(scope="module")
def pipes() -> dict[str, Any]:
    """Pipelines that every test gives back as they were, with their plain output."""
    found: dict[str, Any] = {}
    for family in FAMILIES:
        pipe = tiny.build(family)
        found[family] = (pipe, tiny.run(pipe, family))
    return found


def _weights(model: nn.Module) -> list[ScaledWeight]:
    return [p for p in model.parameters() if isinstance(p, ScaledWeight)]


@pytest.mark.parametrize(
    ("family", "wish"),
    [
        *(("flux", wish) for wish in WISHES),
        ("sd3", "fp8 dynamic row"),
        ("sd3", "int8 weight_only"),
        ("wan", "int8 dynamic"),
    ],
)
def test_on_a_live_pipeline_and_undone(pipes: dict[str, Any], family: str, wish: str) -> None:
    pipe, plain = pipes[family]
    before = snapshot_pipe(pipe)
    accelerate(pipe, None, strict=True, **WISHES[wish])
    model = tiny.denoiser(pipe)
    kinds = {type(m) for m in model.modules() if isinstance(m, nn.Linear)}
    assert kinds == {nn.Linear}, "layers stay what peft and diffusers know"
    assert len(_weights(model)) == {"flux": 34, "sd3": 33, "wan": 30}[family]
    error = float((tiny.run(pipe, family) - plain).norm() / plain.norm())
    assert 1e-6 < error < 0.03, error
    measured = pipe.acceleration.plan.items[0].measured
    assert measured is not None and measured["bytes"] < 0.32 * measured["bytes_before"]  # fp32: a quarter, and scales
    restore(pipe)
    assert differences(before, snapshot_pipe(pipe)) == []
    assert torch.equal(tiny.run(pipe, family), plain)


@pytest.mark.parametrize("wish", PEERS)
def test_other_peoples_weights_in_our_frame(pipes: dict[str, Any], wish: str) -> None:
    pytest.importorskip("torchao" if "torchao" in wish else "optimum.quanto")
    pipe, plain = pipes["flux"]
    before = snapshot_pipe(pipe)
    accelerate(pipe, None, strict=True, **PEERS[wish])
    kinds = {type(m) for m in pipe.transformer.modules() if isinstance(m, nn.Linear)}
    assert kinds == {nn.Linear}
    error = float((tiny.run(pipe, "flux") - plain).norm() / plain.norm())
    assert 1e-6 < error < 0.03, error
    restore(pipe)
    assert differences(before, snapshot_pipe(pipe)) == [] and torch.equal(tiny.run(pipe, "flux"), plain)


def test_verbs_reconfigure_and_replace(pipes: dict[str, Any]) -> None:
    pipe, plain = pipes["flux"]
    attach(pipe)
    assert pipe.enable_fp8(scheme="weight_only") is pipe
    fp8 = tiny.run(pipe, "flux")
    pipe.enable_fp8(scheme="weight_only").enable_fp8(scheme="weight_only")
    assert torch.equal(tiny.run(pipe, "flux"), fp8), "twice is once"
    pipe.enable_int8(scheme="weight_only")
    assert {w.codes.dtype for w in _weights(pipe.transformer)} == {torch.int8}
    assert any("took the place of quantization.fp8" in note for note in pipe.acceleration.plan.notes)
    pipe.enable_fp8(scheme="weight_only")
    assert torch.equal(tiny.run(pipe, "flux"), fp8), "from the originals, not from INT8"
    pipe.disable_quantization()
    assert torch.equal(tiny.run(pipe, "flux"), plain)
    restore(pipe)


def test_text_encoders_and_what_is_kept(pipes: dict[str, Any]) -> None:
    pipe, _ = pipes["sd3"]
    accelerate(
        pipe, None, strict=True, quantization="int8", quantization_text_encoders=True, quantization_keep="to_q$"
    )
    assert all(_weights(getattr(pipe, name)) for name in ("text_encoder", "text_encoder_2", "text_encoder_3"))
    assert all(
        not isinstance(m.weight, ScaledWeight) for n, m in pipe.transformer.named_modules() if n.endswith("to_q")
    )
    assert "matches keep='to_q$'" in pipe.acceleration.plan.items[0].reason
    tiny.run(pipe, "sd3")
    restore(pipe)
    assert not _weights(pipe.text_encoder) and weight_bytes(pipe.transformer) > 0


def test_what_the_plan_says_about_machines(pipes: dict[str, Any]) -> None:
    pipe, _ = pipes["flux"]

    def item(hardware: str, **wishes: Any) -> Any:
        return plan(pipe, None, hardware=hardware, **wishes).items[0]

    assert "no gain in speed" in item("cpu", quantization="fp8").reason
    assert "FP8 dynamic" in item("4090", quantization="fp8").reason
    for old in ("3060", "a100"):
        reason = item(old, quantization="fp8").reason
        assert "FP8 weight_only" in reason and "no FP8 units" in reason
    refused = item("a100", quantization="fp8", quantization_backend="torchao")
    assert refused.status == "refused" and "8.9" in refused.reason
    refused = item("cpu", quantization="fp8", quantization_backend="torchao")
    assert refused.status == "refused" and "native" in refused.reason
    assert "_diffaccel" not in vars(pipe)


@pytest.mark.parametrize("units", [False, True])
def test_int8_adds_no_compile_and_says_what_eager_costs(
    pipes: dict[str, Any], units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, _ = pipes["flux"]
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: units)
    for wishes in ({}, {"compile": False}, {"compile": None}):
        decided = plan(pipe, None, quantization="int8", **wishes)
        assert [entry.name for entry in decided.items] == ["quantization.int8"]
        assert any("run eagerly" in note for note in decided.notes) is units
        assert ("no gain in speed" in decided.items[0].reason) is not units
        gpu = plan(pipe, None, hardware="4090", quantization="int8", **wishes)
        assert [entry.name for entry in gpu.items] == ["quantization.int8"]
        assert any("run eagerly" in note for note in gpu.notes)
    both = plan(pipe, None, quantization="int8", compile=True, compile_backend="eager")
    assert both.enabled == ("quantization.int8", "compile") and not both.notes
    only = plan(pipe, None, quantization="int8", quantization_scheme="weight_only")
    assert [entry.name for entry in only.items] == ["quantization.int8"] and not only.notes


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: Fp8("dynamics"), "dynamic"),
        (lambda: Fp8(granularity="column"), "row"),
        (lambda: Fp8(backend="torcha"), "torchao"),
        (lambda: Fp8(keep_original="ram"), "host"),
        (lambda: Fp8(guard="nan"), "finite"),
        (lambda: Fp8(text_encoders=1), "text_encoders=1"),  # type: ignore[arg-type]
        (lambda: Fp8(first_blocks=-1), "first_blocks=-1"),
        (lambda: Fp8(backend="quanto"), "garbage"),
        (lambda: Fp8("storage", backend="torchao"), "storage"),
        (lambda: Fp8("weight_only", "tensor", backend="quanto"), "per row only"),
        (lambda: Fp8(guard="reference", keep_original="disk"), "host"),
        (lambda: Int8("storage"), "weight_only"),
        (lambda: Int8(backend="quanto"), "garbage"),
    ],
)
def test_bad_values(make: Any, hint: str) -> None:
    with pytest.raises(InvalidOptionError, match=hint):
        make()


def test_refusals_change_nothing(pipes: dict[str, Any]) -> None:
    pipe, plain = pipes["flux"]
    other = tiny.build("flux")
    other.register_modules(transformer=pipe.transformer)
    accelerate(pipe, None, quantization="fp8", strict=True)
    with pytest.raises(IncompatibleError, match="shared"):
        accelerate(other, None, quantization="int8", strict=True)
    restore(pipe)
    with pytest.raises(InvalidOptionError, match="checkpoint of transformer is not on this machine"):
        accelerate(pipe, None, quantization="fp8", quantization_keep_original="source", strict=True)
    with pytest.raises(UnsupportedModelError, match="no layer is left"):
        accelerate(pipe, None, quantization="fp8", quantization_keep=".", strict=True)
    assert torch.equal(tiny.run(pipe, "flux"), plain) and "_diffaccel" not in vars(pipe)


def test_models_that_are_quantized_already_are_refused() -> None:
    quanto = pytest.importorskip("optimum.quanto")
    pipe = tiny.build("flux")
    quanto.quantize(pipe.transformer, weights=quanto.qint8, include="*to_q*")
    quanto.freeze(pipe.transformer)
    with pytest.raises(IncompatibleError, match="quantized already"):
        accelerate(pipe, None, quantization="fp8", strict=True)
    cast = tiny.build("flux")
    cast.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    with pytest.raises(IncompatibleError, match="layerwise casting"):
        accelerate(cast, None, quantization="fp8", strict=True)
    group = tiny.build("flux")
    group.transformer.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    with pytest.raises(IncompatibleError, match="group offload"):
        accelerate(group, None, quantization="fp8", strict=True)


def test_a_weight_that_is_not_finite_is_named_and_nothing_stays(pipes: dict[str, Any]) -> None:
    pipe = tiny.build("flux")
    before = snapshot_pipe(pipe)
    bad = "transformer_blocks.1.attn.to_v"
    with torch.no_grad():
        pipe.transformer.get_submodule(bad).weight[0, 0] = torch.inf
    with pytest.raises(DiffaccelError, match=bad):
        accelerate(pipe, None, quantization="int8", strict=True)
    assert differences(before, snapshot_pipe(pipe)) == []


def test_storage_takes_the_convolutions_of_a_unet() -> None:
    pipe = tiny.build("sdxl")
    plain = tiny.run(pipe, "sdxl")
    accelerate(pipe, None, quantization="fp8", quantization_scheme="storage", strict=True)
    convs = [m for m in pipe.unet.modules() if isinstance(m, nn.Conv2d) and isinstance(m.weight, ScaledWeight)]
    assert len(convs) > 10
    out = tiny.run(pipe, "sdxl")
    assert 1e-6 < float((out - plain).norm() / plain.norm()) < 0.05
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "sdxl"), plain)


def test_a_cast_of_the_pipeline_keeps_it_quantized() -> None:
    """X3 on a pipeline: `.to(bfloat16)` and back changes neither codes nor scales; undo gives the cast originals."""
    pipe = tiny.build("flux")
    original = {n: p.detach().clone() for n, p in pipe.transformer.named_parameters()}
    accelerate(pipe, None, quantization="fp8", strict=True)
    codes = [w.codes.float() for w in _weights(pipe.transformer)]
    pipe.to(torch.bfloat16)
    assert len(_weights(pipe.transformer)) == len(codes)
    assert all(torch.equal(w.codes.float(), c) for w, c in zip(_weights(pipe.transformer), codes, strict=True))
    assert torch.isfinite(tiny.run(pipe, "flux").float()).all()
    restore(pipe)
    for name, parameter in pipe.transformer.named_parameters():
        assert parameter.dtype is torch.bfloat16 and torch.equal(parameter, original[name].bfloat16()), name
