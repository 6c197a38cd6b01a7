"""Regional compile: whole blocks, hooks outside, nothing compiled twice, everything put back.

Graphs are counted by PyTorch itself. The backend is "eager": tracing and guards are real, code is not generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from diffaccel import (
    IncompatibleError,
    InvalidOptionError,
    MissingDependencyError,
    Plan,
    UnsupportedModelError,
    accelerate,
    attach,
    plan,
    restore,
)
from tests import fingerprint, tiny

COMPILED = "_compiled_call_impl"
EAGER: dict[str, Any] = {"compile": True, "compile_backend": "eager"}
CACHE: dict[str, Any] = {"cache": "first_block", "cache_min_steps": 0, "cache_last_steps": 0}
THRESHOLD = {"flux": 0.3, "wan": 0.11}


@pytest.fixture
def graphs() -> Iterator[Callable[[], int]]:
    """A clean torch.compile; the number of graphs it has made so far."""
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def kinds(pipe: Any) -> int:
    return len({type(block) for block in tiny.blocks(tiny.denoiser(pipe))})


def strip(pipe: Any) -> dict[str, str]:
    return dict(pipe.acceleration.report.strip())


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


# ---- what it does ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["flux", "wan", "sd3"])
def test_blocks_are_whole_and_compiled_once(family: str, graphs: Callable[[], int]) -> None:
    pipe = tiny.build(family)
    reference = tiny.run(pipe, family, num_inference_steps=3)
    before = fingerprint.snapshot_pipe(pipe)
    accelerate(pipe, None, **EAGER, compile_fullgraph=True)  # fullgraph: a break would raise
    same(tiny.run(pipe, family, num_inference_steps=3), reference)
    made = graphs()
    assert 0 < made <= 2 * kinds(pipe)
    assert pipe.acceleration.report.stats["compile"] == {"graphs_compiled": made, "graph_breaks": 0}
    with torch._dynamo.config.patch(error_on_recompile=True):
        same(tiny.run(pipe, family, num_inference_steps=3), reference)
    assert graphs() == made
    assert pipe.acceleration.report.stats["compile"]["graphs_compiled"] == 0
    assert pipe.acceleration.plan.item("compile").fidelity == "equivalent"
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert not any(COMPILED in vars(module) for module in tiny.denoiser(pipe).modules())
    assert torch.equal(tiny.run(pipe, family, num_inference_steps=3), reference)
    assert graphs() == made, "still compiling after restore"


def test_both_experts(graphs: Callable[[], int]) -> None:
    """Wan 2.2: both denoisers are compiled, and share their graphs."""
    pipe = accelerate(tiny.build("wan22"), None, **EAGER)
    assert all(COMPILED in vars(block) for model in (pipe.transformer, pipe.transformer_2) for block in model.blocks)
    assert "6 blocks of 1 kind" in pipe.acceleration.plan.item("compile").reason
    tiny.run(pipe, "wan22", num_inference_steps=3)
    assert {step.component for step in pipe.acceleration.report.steps} == {"transformer", "transformer_2"}
    assert 0 < graphs() <= 2


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_with_the_cache_in_either_order(family: str, graphs: Callable[[], int]) -> None:
    """C61. Picture and hits of the uncompiled cache; its decision is in no graph, so fullgraph holds."""
    options = CACHE | {"cache_threshold": THRESHOLD[family]}
    call = {"num_inference_steps": 4} | tiny.no_guidance(family)
    pipe = accelerate(tiny.build(family), None, **options)
    reference = tiny.run(pipe, family, **call)
    hits = strip(pipe)
    assert "." in "".join(hits.values()) and "C" in "".join(hits.values())
    restore(pipe)
    plain = fingerprint.snapshot_pipe(pipe)
    parameters = {key.removeprefix("cache_"): value for key, value in options.items() if key != "cache"}

    attach(pipe).enable_compile(backend="eager", fullgraph=True).enable_first_block_cache(**parameters)
    same(tiny.run(pipe, family, **call), reference)
    assert strip(pipe) == hits
    made = graphs()
    assert 0 < made <= 2 * kinds(pipe)
    pipe.disable_compile()
    same(tiny.run(pipe, family, **call), reference)
    assert strip(pipe) == hits and graphs() == made
    pipe.enable_compile(backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        same(tiny.run(pipe, family, **call), reference)
    assert strip(pipe) == hits and graphs() == made, "the same blocks were compiled again"
    pipe.disable_cache()
    assert pipe.acceleration.plan.enabled == ("compile",)
    restore(pipe)
    fingerprint.assert_same(plain, fingerprint.snapshot_pipe(pipe))


def test_with_an_attention_backend(graphs: Callable[[], int]) -> None:
    """The backend is in the processors only during calls, which the graphs must not notice from call to call."""
    pipe = accelerate(tiny.build("flux"), None, **EAGER, attention="native")
    reference = tiny.run(tiny.build("flux"), "flux", num_inference_steps=2)
    same(tiny.run(pipe, "flux", num_inference_steps=2), reference)
    made = graphs()
    with torch._dynamo.config.patch(error_on_recompile=True):
        tiny.run(pipe, "flux", num_inference_steps=2)
    assert graphs() == made > 0


@pytest.mark.parametrize("ours", [True, False])
def test_dynamic_sizes_do_not_recompile(ours: bool, graphs: Callable[[], int]) -> None:
    """C60: the first token count equals the channel count (32). Negative control: plain torch.compile recompiles."""
    pipe = tiny.build("wan")
    first = {"height": 32, "width": 64, "num_frames": 13}  # 4 x (2 x 4) = 32 tokens
    call = {"num_inference_steps": 2} | tiny.no_guidance("wan")
    assert pipe.transformer.config.num_attention_heads * pipe.transformer.config.attention_head_dim == 32
    if ours:
        accelerate(pipe, None, **EAGER, compile_dynamic=True)
    else:
        for block in tiny.blocks(pipe.transformer):
            block.compile(backend="eager", dynamic=True)
    tiny.run(pipe, "wan", **first, **call)
    made = graphs()
    tiny.run(pipe, "wan", height=64, width=64, num_frames=13, **call)
    assert (graphs() == made) is ours
    assert torch.fx.experimental._config.use_duck_shape, "a process-wide setting was left behind"


# ---- whose compile it is --------------------------------------------------------------------------------


def test_the_users_compiled_blocks_stay_theirs(graphs: Callable[[], int]) -> None:
    pipe = tiny.build("flux")
    reference = tiny.run(pipe, "flux", num_inference_steps=2)
    theirs = pipe.transformer.transformer_blocks[0]
    theirs.compile(backend="eager")
    compiled = vars(theirs)[COMPILED]
    before = fingerprint.snapshot_pipe(pipe)
    accelerate(pipe, None, **EAGER, **CACHE, cache_threshold=1e9)
    assert "1 stay as you compiled them" in pipe.acceleration.plan.item("compile").reason
    tiny.run(pipe, "flux", num_inference_steps=2)
    pipe.disable_cache().enable_compile(backend="eager")  # again, over itself
    assert "3 blocks" in pipe.acceleration.plan.item("compile").reason
    same(tiny.run(pipe, "flux", num_inference_steps=2), reference)
    restore(pipe)
    assert vars(theirs)[COMPILED] is compiled
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


def test_what_the_user_compiles_meanwhile_stays(graphs: Callable[[], int]) -> None:
    pipe = accelerate(tiny.build("flux"), None, **EAGER)
    block = pipe.transformer.transformer_blocks[1]
    block.compile(backend="aot_eager")
    compiled = vars(block)[COMPILED]
    restore(pipe)
    assert vars(block)[COMPILED] is compiled
    assert sum(COMPILED in vars(b) for b in tiny.blocks(pipe.transformer)) == 1


def test_all_compiled_already(graphs: Callable[[], int]) -> None:
    pipe = tiny.build("flux")
    pipe.transformer.compile_repeated_blocks(backend="eager")
    item = plan(pipe, None, **EAGER).item("compile")
    assert item.status == "skipped" and "all 4 blocks are compiled already" in item.reason


@pytest.mark.parametrize("kind", ["in place", "wrapped"])
@pytest.mark.parametrize("cached", [True, False])
def test_a_model_compiled_as_a_whole_is_refused(kind: str, cached: bool, graphs: Callable[[], int]) -> None:
    pipe = tiny.build("flux")
    if kind == "in place":
        pipe.transformer.compile(backend="eager")
    else:
        pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    attach(pipe)
    if cached:  # our root hook has taken the compiled body in by now
        pipe.enable_first_block_cache(threshold=0.3)
    with pytest.raises(IncompatibleError, match=r"transformer is compiled as a whole"):
        pipe.enable_compile(backend="eager")
    assert plan(pipe, None, **EAGER).item("compile").status == "refused"


def test_foreign_hooks_refuse_fullgraph_only(graphs: Callable[[], int]) -> None:
    pipe = tiny.build("flux")
    pipe.transformer.enable_group_offload(
        onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), offload_type="leaf_level"
    )
    item = plan(pipe, None, **EAGER, compile_fullgraph=True).item("compile")
    assert item.status == "refused" and "group_offloading" in item.reason
    assert plan(pipe, None, **EAGER).item("compile").status == "enabled"


def test_a_replaced_denoiser_is_followed(graphs: Callable[[], int]) -> None:
    pipe = accelerate(tiny.build("wan"), None, **EAGER)
    old, new = pipe.transformer, tiny.build("wan", seed=1).transformer
    pipe.transformer = new
    tiny.run(pipe, "wan", num_inference_steps=1)
    assert all(COMPILED in vars(block) for block in new.blocks)
    assert not any(COMPILED in vars(block) for block in old.blocks)
    restore(pipe)
    assert not any(COMPILED in vars(block) for block in new.blocks)


def test_a_paused_run_goes_on(graphs: Callable[[], int]) -> None:
    """Snapshot, another run, resume: bit-equal to the undisturbed run, and nothing compiled again."""
    pipe = accelerate(tiny.build("wan"), None, **EAGER, **CACHE, cache_threshold=0.11, vae_tiling="blended")
    call = {"num_inference_steps": 4} | tiny.no_guidance("wan")
    reference = tiny.run(pipe, "wan", **call)
    taken: list[Any] = []

    def pause(inner: Any, step: int, *rest: Any) -> dict[str, Any]:
        if step == 1:
            taken.append(pipe.acceleration.snapshot())
        return {}

    tiny.run(pipe, "wan", **call, callback_on_step_end=pause)
    tiny.run(pipe, "wan", **call, prompt="another one")
    made = graphs()
    assert torch.equal(tiny.output(pipe.acceleration.resume(taken[0])), reference)
    assert graphs() == made


# ---- what it needs --------------------------------------------------------------------------------------


def test_a_unet_has_no_blocks() -> None:
    pipe = tiny.build("sdxl")
    assert "U-Net" in plan(pipe, None, **EAGER).item("compile").reason
    with pytest.raises(UnsupportedModelError, match="sdxl"):
        attach(pipe).enable_compile(backend="eager")


def test_inductor_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny.build("flux")
    monkeypatch.setenv("CXX", "no-such-compiler")
    item = plan(pipe, None, compile=True).item("compile")
    assert item.status == "skipped" and "no-such-compiler" in item.reason
    with pytest.raises(MissingDependencyError, match="C\\+\\+ compiler"):
        accelerate(pipe, None, strict=True, compile=True)
    assert plan(pipe, None, **EAGER).item("compile").status == "enabled", "only inductor needs one"


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"compile_backend": "inducter"}, "inductor"),
        ({"compile_backend": 3}, "compile_backend"),
        ({"compile_mode": "reduce-overhead"}, "CUDA graphs"),
        ({"compile_mode": "max-autotune-no-cudagraph"}, "max-autotune-no-cudagraphs"),
        ({"compile_mode": "default", "compile_backend": "eager"}, "eager"),
        ({"compile_dynamic": "yes"}, "compile_dynamic"),
        ({"compile_fulgraph": True}, "compile_fullgraph"),
    ],
)
def test_bad_options(options: dict[str, Any], meant: str) -> None:
    pipe = tiny.build("flux")
    with pytest.raises(InvalidOptionError, match=meant):
        accelerate(pipe, None, strict=True, compile=True, **options)
    assert "_diffaccel" not in vars(pipe) and not any(COMPILED in vars(b) for b in tiny.blocks(pipe.transformer))


def test_a_plan_with_compile_is_a_preset() -> None:
    pipe = tiny.build("flux")
    decided = Plan.from_toml(plan(pipe, None, **EAGER, compile_dynamic=True).to_toml())
    again = plan(pipe, decided).item("compile")
    assert again.status == "enabled" and again.params["backend"] == "eager" and again.params["dynamic"] is True


@pytest.mark.slow
def test_inductor_itself(graphs: Callable[[], int]) -> None:
    """One real compilation, on a CPU with a C++ compiler."""
    pipe = tiny.build("wan")
    call = {"num_inference_steps": 2} | tiny.no_guidance("wan")
    reference = tiny.run(pipe, "wan", **call)
    if plan(pipe, None, compile=True).item("compile").status != "enabled":
        pytest.skip(plan(pipe, None, compile=True).item("compile").reason)
    accelerate(pipe, None, compile=True)
    torch.testing.assert_close(tiny.run(pipe, "wan", **call), reference, atol=1e-3, rtol=0)
    assert pipe.acceleration.report.stats["compile"]["graphs_compiled"] > 0
