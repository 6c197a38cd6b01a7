"""SageAttention: 8 bits where they fit, and plain attention, said and counted, where they do not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from diffaccel import accelerate, plan, restore
from diffaccel.attention.backends import SAGE, Backend, unfit_call
from diffaccel.attention.calls import Counts, Inputs, Where
from diffaccel.attention.sage import config as sage
from diffaccel.attention.sage.config import NAME, SageAttention, SageHandler
from diffaccel.attention.sage.int8 import int8_attention_reference
from diffaccel.attention.sage.variants import attend, kernel_of
from diffaccel.core.run import Call, Run
from diffaccel.errors import InvalidOptionError, MissingDependencyError
from tests import fingerprint, tiny
from tests.models.families import table

from .cases import relative_l1, tensors, truth

LIMIT = 0.02
REFERENCE = {"attention": "sage", "attention_variant": "reference"}


def inputs(shape: tuple[int, ...], mask: torch.Tensor | None = None, **more: Any) -> Inputs:
    """A call with q, k, v [B, N, H, D] of normal numbers."""
    keys = more.pop("keys", None)
    return Inputs(*(x.transpose(1, 2) for x in tensors(shape, keys=keys)), mask, **more)


def sdpa(call: Inputs) -> torch.Tensor:
    """What the plain pipeline computes, [B, N, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    return F.scaled_dot_product_attention(q, k, v, call.mask, scale=call.scale).transpose(1, 2)


def prefix(keys: int, *valid: int) -> torch.Tensor:
    """[B, 1, 1, keys] mask of padding."""
    return (torch.arange(keys) < torch.tensor(valid)[:, None])[:, None, None]


class Bench:
    """A handler, and one layer of a run to call it in."""

    def __init__(self, kernels: list[tuple[Backend, Any]] | None = None, **lever: Any) -> None:
        kernels = kernels or [(SAGE["reference"], kernel_of("reference"))]
        self.handler = SageHandler(SageAttention("reference", **lever), kernels)
        self.run = Run(SimpleNamespace(), lambda pipe, i: "cond", None)
        self.handler.begin_run(self.run)

    def __call__(self, call: Inputs, layer: int = 0, cross: bool = False) -> Any:
        where = Where(layer, 2, f"blocks.{layer}.attn", cross, None, Call(self.run, "transformer", "cond", None))
        return self.handler(where, call, lambda: sdpa(call))

    @property
    def counts(self) -> Counts:
        """What it counted."""
        counts: Counts = self.run.state[NAME]["counts"]
        return counts


# ---- the config and the plan ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"variant": "tritn"}, "did you mean 'triton'"),
        ({"variant": 2}, "must be text"),
        ({"smooth_k": 1}, "must be True or False"),
        ({"guard": "never"}, "True, False or 'every'"),
        ({"variant": "2", "smooth_k": False}, "always smooths"),
    ],
)
def test_bad_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        SageAttention(**fields)


def test_on_a_cpu_it_stays_off_and_says_why() -> None:
    pipe = tiny.build("wan")
    item = plan(pipe, None, attention="sage").item(NAME)
    assert item.status == "skipped" and "gains nothing on a CPU" in item.reason and item.fidelity == "lossy"
    with pytest.raises(InvalidOptionError, match="gains nothing on a CPU"):
        accelerate(pipe, None, attention="sage", strict=True)
    restore(pipe)


def test_plans_for_gpus() -> None:
    """Tiny models have heads of 16: 1.x cannot serve them, our own kernel can, 2.x is not installed."""
    pipe = tiny.build("flux", dtype=torch.bfloat16)

    def item(hardware: str, variant: str = "auto") -> Any:
        return plan(pipe, None, hardware=hardware, attention="sage", attention_variant=variant).item(NAME)

    assert item("4090").reason == item("b200").reason == "variant triton"
    assert "64, 96, 128, the model has" in item("4090", "1").reason
    assert "2.1.1 or later is needed" in item("4090", "2").reason or "not installed" in item("4090", "2").reason
    assert "10.0, h100 has less" in item("h100", "3").reason
    assert item("4090", "hub").reason == "kernels is not installed (pip install kernels)"
    with pytest.raises(MissingDependencyError, match="pip install kernels"):
        accelerate(pipe, None, hardware="4090", attention="sage", attention_variant="hub", strict=True)
    restore(pipe)


# ---- in a pipeline --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["flux_cfg", "hunyuan_video", "ltx", "qwen", "sd3"])
def test_pipelines(family: str) -> None:
    plain = table.run(table.build(family), family)[0]
    pipe = accelerate(table.build(family), None, strict=True, **REFERENCE)
    out = table.run(pipe, family)[0]
    stats = pipe.acceleration.report.stats[NAME]
    assert stats["calls"]["reference"] > 0 and not torch.equal(out, plain)
    assert (out - plain).abs().mean() < 0.02 * plain.abs().mean()
    assert pipe.acceleration.report.notes == [] or stats["fallbacks"]
    restore(pipe)
    assert torch.equal(table.run(pipe, family)[0], plain)


def test_cross_attention_stays() -> None:
    pipe = accelerate(tiny.build("wan"), None, **REFERENCE)
    tiny.run(pipe, "wan")
    calls = pipe.acceleration.report.stats[NAME]["calls"]
    assert calls["other"] == calls["reference"] > 0
    restore(pipe)


def test_nothing_stays_and_nobody_else_sees_it() -> None:
    """C46: another pipeline, a second transformer of the class and the VAE are as they were, during and after."""
    other, pipe = tiny.build("wan"), tiny.build("wan")
    plain = tiny.run(other, "wan")
    assert torch.equal(tiny.run(pipe, "wan"), plain)
    before = fingerprint.snapshot_pipe(pipe)
    accelerate(pipe, None, **REFERENCE)
    assert not torch.equal(tiny.run(pipe, "wan"), plain)
    assert torch.equal(tiny.run(other, "wan"), plain)
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


def test_whole_graphs() -> None:
    pipe = accelerate(tiny.build("wan"), None, **REFERENCE)
    eager = tiny.run(pipe, "wan")
    torch._dynamo.reset()
    pipe.enable_compile(backend="eager", fullgraph=True)
    assert torch.equal(tiny.run(pipe, "wan"), eager)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(tiny.run(pipe, "wan"), eager)
    restore(pipe)


# ---- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("valid", [(64,), (128,), (77, 40)])
def test_padding_is_cut_off_exactly(valid: tuple[int, ...]) -> None:
    """C45. The same numbers as a call that never had the padding."""
    call = inputs((len(valid), 2, 128, 64), prefix(128, *valid))
    bench = Bench()
    out = bench(call)
    assert bench.counts.stats() == {"calls": {"reference": 1}, "fallbacks": {}}
    wanted = truth(*(x.transpose(1, 2) for x in (call.q, call.k, call.v)), call.mask)[0].transpose(1, 2)
    assert relative_l1(out, wanted) <= LIMIT
    for i, n in enumerate(valid):
        q, k, v = (x[i : i + 1].transpose(1, 2) for x in (call.q, call.k[:, :n], call.v[:, :n]))
        assert torch.equal(out[i : i + 1].transpose(1, 2), int8_attention_reference(q, k, v))  # type: ignore[arg-type]
    unmasked = sdpa(replace(call, mask=None))
    assert min(valid) == 128 or relative_l1(out, unmasked.double()) > 0.1, "the control"


def test_padded_queries_are_computed_as_before() -> None:
    """Masks that hide padded queries as well (HunyuanVideo's own): their rows are those of the plain pipeline."""
    row = prefix(96, 70)
    call = inputs((1, 2, 96, 64), row & row.transpose(-1, -2))
    bench = Bench()
    out, plain = bench(call), sdpa(call)
    assert bench.counts.calls == {"reference": 1}
    assert torch.equal(out[:, 70:].nan_to_num(7), plain[:, 70:].nan_to_num(7))
    assert relative_l1(out[:, :70], plain[:, :70].double()) <= LIMIT


@pytest.mark.parametrize("kind", ["scattered", "per query", "additive bias", "nothing left"])
def test_other_masks_fall_back(kind: str) -> None:
    """C45: half of the keys hidden in a way that no kernel obeys: bit-equal to masked SDPA, counted, said once."""
    mask = torch.zeros(1, 1, 1, 128, dtype=torch.bool)
    mask[..., ::2] = True
    if kind == "per query":
        mask = torch.rand(1, 1, 128, 128, generator=torch.Generator().manual_seed(0)) < 0.5
    elif kind == "additive bias":
        mask = torch.where(mask, 0.0, -3.0)
    elif kind == "nothing left":
        mask = prefix(128, 0)
    call = inputs((1, 2, 128, 64), mask)
    bench = Bench()
    for _ in range(3):
        assert torch.equal(bench(call).nan_to_num(7), sdpa(call).nan_to_num(7))
    assert bench.counts.calls == {"fallback": 3} and sum(bench.counts.fallbacks.values()) == 3
    assert len(bench.run.notes) == 1 and "blocks.0.attn" in bench.run.notes[0]


def test_masks_reach_no_kernel(interpreted: dict[str, Any]) -> None:
    """C45 for sageattention 1.0.6's own kernels and for ours in Triton, interpreted."""
    for found in interpreted["masks"].values():
        assert found["masked"] <= LIMIT and found["unmasked"] > 0.5


# ---- what kernels cannot do -----------------------------------------------------------------------------------------


def never(*args: Any, **kwargs: Any) -> Any:
    """A kernel that must not be called."""
    raise AssertionError("called")


@pytest.mark.parametrize("variant", ["1", "2", "3", "hub", "triton"])
@pytest.mark.parametrize("dim", [40, 80, 160, 256, 512])
def test_head_sizes_that_do_not_fit(variant: str, dim: int) -> None:
    """C47: the result is plain attention's, bit by bit, and the report counts it."""
    here = replace(SAGE[variant], devices=("cpu",), dtypes=None)
    if unfit_call(here, (1, 64, 2, dim), (1, 64, 2, dim), torch.float32, "cpu") is None:
        assert dim <= 128 and variant in ("2", "hub", "triton")
        return
    call, bench = inputs((1, 2, 64, dim)), Bench([(here, never)])
    assert torch.equal(bench(call), sdpa(call))
    assert list(bench.counts.fallbacks.values()) == [1] and str(dim) in next(iter(bench.counts.fallbacks))


@pytest.mark.parametrize("dim", [40, 80, 160, 256, 512])
def test_head_sizes_of_the_reference(dim: int) -> None:
    """C47, with padding and another number of keys."""
    bench = Bench()
    call = inputs((1, 2, 96, dim), prefix(37, 7), keys=37)
    wanted = truth(*(x.transpose(1, 2) for x in (call.q, call.k, call.v)), call.mask)[0].transpose(1, 2)
    assert relative_l1(bench(call), wanted) <= LIMIT and bench.counts.calls == {"reference": 1}


def test_calls_that_are_left_alone() -> None:
    bench = Bench([(SAGE["reference"], never)])
    call = inputs((1, 2, 64, 64))
    assert torch.equal(bench(call, cross=True), sdpa(call)) and torch.equal(bench(call, layer=-1), sdpa(call))
    assert bench.counts.stats() == {"calls": {"other": 2}, "fallbacks": {}} and not bench.run.notes
    gpu = Bench([(SAGE["triton"], never)])
    assert torch.equal(gpu(call), sdpa(call)) and "tensors are on cpu" in next(iter(gpu.counts.fallbacks))


def test_the_next_variant_takes_what_the_first_cannot() -> None:
    first = replace(SAGE["1"], devices=("cpu",))
    bench = Bench([(first, never), (SAGE["reference"], kernel_of("reference"))])
    bench(inputs((1, 2, 64, 64), keys=77))
    assert bench.counts.stats() == {"calls": {"reference": 1}, "fallbacks": {}}


def test_log_sum_exp() -> None:
    call = inputs((2, 2, 64, 64), prefix(64, 50, 30), lse=True)
    out, lse = Bench()(call)
    wanted, wanted_lse = truth(*(x.transpose(1, 2) for x in (call.q, call.k, call.v)), call.mask)
    assert relative_l1(out.transpose(1, 2), wanted) <= LIMIT and (lse - wanted_lse).abs().max() < 0.05
    scattered = torch.arange(64)[None, None, None] % 2 == 0
    bench, call = Bench(), replace(call, mask=scattered)
    out, lse = bench(call)
    assert torch.equal(out, sdpa(call)) and bench.counts.calls == {"fallback": 1}
    scores = truth(*(x.transpose(1, 2) for x in (call.q, call.k, call.v)), scattered)[1]
    assert (lse - scores).abs().max() < 1e-4


def test_version_1_tails_and_keys(interpreted: dict[str, Any]) -> None:
    """Its own kernels, interpreted: 77 keys are wrong by a quarter (and cosine does not see it), 256 are right."""
    short, whole = interpreted["sage_1"]["77"], interpreted["sage_1"]["256"]
    assert short["theirs"] > 0.2 and short["ours"] > 0.2 and short["cosine"] > 0.99
    shape = (1, 128, 2, 64)
    refused = unfit_call(SAGE["1"], shape, (1, 77, 2, 64), torch.float16, "cuda")
    assert refused is not None and "tail of 77 keys" in refused
    assert unfit_call(SAGE["1"], shape, (1, 256, 2, 64), torch.float16, "cuda") is None
    assert whole["theirs"] <= LIMIT and whole["ours"] <= LIMIT
    assert short["they_wrote"] and whole["they_wrote"] and not short["we_wrote"] and not whole["we_wrote"]


@pytest.mark.parametrize("variant", ["1", "2", "3", "hub", "reference"])
def test_nothing_is_written_to_and_scale_arrives(variant: str) -> None:
    """Every adapter around a kernel that does what the worst of them do: write to K, ignore masks and scales."""
    call = inputs((1, 2, 64, 64), scale=0.3)  # views, whose transposition is contiguous
    before = [x.clone() for x in (call.q, call.k, call.v)]

    def heads_last(q: Any, k: Any, v: Any, sm_scale: Any = None, **more: Any) -> torch.Tensor:
        assert "attn_mask" not in more and more["tensor_layout"] == "NHD"
        out = sdpa(Inputs(q, k, v, scale=sm_scale))
        if variant == "1" and more["smooth_k"]:
            k.zero_()
        return out

    def heads_first(q: Any, k: Any, v: Any, is_causal: bool = False) -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v)
        k.zero_()
        return out

    kernels: dict[str, Callable[..., Any]] = {"3": heads_first, "reference": kernel_of("reference")}
    out = attend(variant, kernels.get(variant, heads_last), call, (64,))
    wanted = truth(*(x.transpose(1, 2) for x in (call.q, call.k, call.v)), scale=0.3)[0].transpose(1, 2)
    assert relative_l1(out, wanted) <= (0.03 if variant == "reference" else 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, (call.q, call.k, call.v), strict=True))


# ---- the guard ------------------------------------------------------------------------------------------------------


def test_hard_numbers(interpreted: dict[str, Any]) -> None:
    """C48: entries of 3e2 and a row of zeros in float16 stay finite (all but one-hot rows: 8 bits show more)."""
    for found in interpreted["hard_numbers"].values():
        assert found["finite"] and found["l1"] < 0.06


def half_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> Any:
    """8-bit attention that keeps V in float16, as version 1 does: values beyond 65504 become infinite."""
    return int8_attention_reference(q, k, v.half().float(), **more)


def loud(pipe: Any) -> Any:
    """Make the values of the first block's self-attention too large for float16; the plain pipeline is fine."""
    attention = pipe.transformer.blocks[0].attn1
    with torch.no_grad():
        attention.to_v.weight.mul_(1e7)
        attention.to_out[0].weight.mul_(1e-7)
    return pipe


def run_loud(monkeypatch: pytest.MonkeyPatch, **lever: Any) -> tuple[torch.Tensor, torch.Tensor, Any, list[str]]:
    """(plain output, output in 8 bits, report, warnings) of such a pipeline."""
    plain = tiny.run(loud(tiny.build("wan")), "wan")
    assert torch.isfinite(plain).all()
    monkeypatch.setattr(sage, "kernel_of", lambda variant: half_values)
    pipe = accelerate(loud(tiny.build("wan")), None, **REFERENCE, **lever)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = tiny.run(pipe, "wan")
    report = pipe.acceleration.report
    restore(pipe)
    return plain, out, report, [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]


def test_the_guard_gives_up_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """C48: no black picture; one layer is off, the others are in 8 bits, and it is said."""
    plain, out, report, said = run_loud(monkeypatch)
    assert torch.isfinite(out).all() and (out - plain).abs().mean() < 0.02 * plain.abs().mean()
    stats = report.stats[NAME]
    assert stats["layers_off"] == ["blocks.0.attn1"]
    layers = len(tiny.build("wan").transformer.blocks)
    assert stats["calls"]["fallback"] * (layers - 1) == stats["calls"]["reference"]
    assert [text for text in said if "not finite at blocks.0.attn1" in text] == [said[0]]
    assert any("not finite at blocks.0.attn1" in note for note in report.notes)


def test_without_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    _, out, report, _ = run_loud(monkeypatch, attention_guard=False)
    assert not torch.isfinite(out).all() and report.stats[NAME]["layers_off"] == []


def test_rows_of_zeros_are_given_up() -> None:
    def dead(q: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        out = torch.ones_like(q)
        out[:, :, 5] = 0
        return out

    bench, call = Bench([(SAGE["reference"], dead)]), inputs((1, 2, 64, 64))
    with pytest.warns(RuntimeWarning, match="rows of zeros at blocks.0.attn"):
        assert torch.equal(bench(call), sdpa(call))
    assert torch.equal(bench(call), sdpa(call)) and list(bench.counts.fallbacks.values()) == [2]
    bench.handler.begin_run(bench.run)
    assert bench.run.state[NAME]["off"] == {}, "the next run trusts the layer anew"


def test_later_results_on_a_gpu_are_read_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a look would make a device wait, a result that breaks later is marked, and said when the run ends."""
    monkeypatch.setattr(sage, "WAITING", ("cpu",))
    calls = [0]

    def late(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> Any:
        calls[0] += 1
        return int8_attention_reference(q, k, v * (torch.inf if calls[0] == 3 else 1), **more)

    bench, call = Bench([(SAGE["reference"], late)]), inputs((1, 2, 64, 64))
    fine = [bool(torch.isfinite(bench(call)).all()) for _ in range(4)]
    assert fine == [True, True, False, True]
    with pytest.warns(RuntimeWarning, match=r"after the first .* at blocks.0.attn; .* guard='every'"):
        bench.handler.stats(bench.run)
    calls[0] = 0
    every = Bench([(SAGE["reference"], late)], guard="every")
    with pytest.warns(RuntimeWarning, match="computed plainly from here on"):
        assert all(bool(torch.isfinite(every(call)).all()) for _ in range(4))
