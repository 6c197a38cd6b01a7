"""One lever is changed, added or removed by its verb while six others are on: nobody else's work is done again.

Counted: bytes written to and read back from the store of layerwise offload, layers quantized, graphs compiled, and
hook objects of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch

from diffaccel import IncompatibleError, accelerate, restore
from diffaccel.core.compat import compile_counts
from diffaccel.offload import store
from diffaccel.planner.resolve import resolve
from diffaccel.quantization import swap
from diffaccel.quantization.svdquant import config as svdquant
from tests import tiny
from tests.fingerprint import assert_same, snapshot_pipe
from tests.quantization.loras import state_dict

FAMILY = "flux"
ON: dict[str, dict[str, Any]] = {
    "quantization": {"quantization": "int8"},
    "compile": {"compile": True, "compile_backend": "eager"},
    "offload": {"offload": "layerwise", "offload_store": "disk", "offload_resident_layers": 1},
    "vae_tiling": {"vae_tiling": "exact"},
    "guidance": {},
    "cache": {"cache": "first_block", "cache_threshold": 0.3, "cache_min_steps": 0, "cache_last_steps": 0},
}

Verb = Callable[[Any], Any]
CACHE: Verb = lambda p: p.enable_first_block_cache(threshold=0.3, min_steps=0, last_steps=0)  # noqa: E731
OFFLOAD: Verb = lambda p: p.enable_layerwise_offload(store="disk", resident_layers=1)  # noqa: E731
COMPILE: Verb = lambda p: p.enable_compile(backend="eager")  # noqa: E731
INT8: Verb = lambda p: p.enable_int8()  # noqa: E731
VAE: Verb = lambda p: p.enable_vae_tiling(exact=True)  # noqa: E731
ATTENTION: Verb = lambda p: p.enable_attention("flex")  # noqa: E731


def lora(pipe: Any, merge: bool = False) -> None:
    pipe.acceleration.loras.load(state_dict(tiny.build(FAMILY), FAMILY), "style", 0.5, merge=merge)


@dataclass
class Work:
    """What is done again."""

    written: int = 0
    read: int = 0
    quantized: int = 0
    resolved: int = 0
    graphs: int = 0
    seen: list[str] = field(default_factory=list)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """Counts while the test runs; the real things are done all the same."""
    done = Work()

    def count(owner: Any, name: str, add: Callable[..., None]) -> None:
        real = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            add(*args)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    def written(*args: Any) -> None:
        done.written += args[1].nbytes

    def read(*args: Any) -> None:
        done.read += args[0].nbytes

    def quantized(*args: Any) -> None:
        done.quantized += 1

    def resolved(*args: Any) -> None:
        done.resolved += 1

    count(store.DiskStore, "put", written)
    count(store.StoredTensors, "read", read)
    count(store.StoredTensors, "give_back", read)
    count(swap.Swapped, "put_on", quantized)
    count(svdquant, "quantize_job", quantized)
    count(__import__("diffaccel.handle", fromlist=["resolve"]), "resolve", resolved)
    yield done


def hooks(pipe: Any) -> dict[str, dict[str, int]]:
    """Module -> name of a hook of ours -> its identity, over all components."""
    found = {}
    for component, module in pipe.components.items():
        for name, child in module.named_modules() if isinstance(module, torch.nn.Module) else ():
            registry = vars(child).get("_diffusers_hook")
            if registry is not None:
                found[f"{component}.{name}"] = {
                    key: id(hook) for key, hook in registry.hooks.items() if key.startswith("diffaccel.")
                }
    return found


def without(found: dict[str, dict[str, int]], part: str) -> dict[str, dict[str, int]]:
    rows = {name: {k: v for k, v in row.items() if part not in k} for name, row in found.items()}
    return {name: row for name, row in rows.items() if row}


def loaded(quantization: str = "int8", merge: bool = False) -> Any:
    """A pipeline with everything on, warm."""
    options: dict[str, Any] = {}
    for values in ON.values():
        options |= values
    if quantization != "int8":
        options |= {"quantization": quantization}
    pipe = accelerate(tiny.build(FAMILY), None, **options)
    lora(pipe, merge)
    tiny.run(pipe, FAMILY)
    tiny.run(pipe, FAMILY)
    return pipe


# (what is done, part of the names of its own hooks)
CHANGES: dict[str, tuple[Verb, str]] = {
    "cache threshold": (lambda p: p.enable_first_block_cache(threshold=0.2, min_steps=0, last_steps=0), "cache."),
    "cache method": (lambda p: p.enable_easycache(threshold=0.2, min_steps=0, last_steps=0), "cache."),
    "cache off": (lambda p: p.disable_cache(), "cache."),
    "exact VAE off": (lambda p: p.disable_vae_tiling(), "vae"),
    "VAE mode": (lambda p: p.enable_vae_tiling(exact=True, mode="low"), "vae"),
    "VAE blended": (lambda p: p.enable_vae_tiling(), "vae"),
    "LoRA strength": (lambda p: p.acceleration.loras.set({"style": 1.0}), "lora"),
    "LoRA off": (lambda p: p.acceleration.loras.unload(), "lora"),
    "compile off": (lambda p: p.disable_compile(), "compile"),
    "guidance reuse on": (lambda p: p.enable_guidance_cache(min_steps=0), "guidance"),
    "attention on": (lambda p: p.enable_attention("flex"), "attention"),
    "nothing new": (CACHE, "cache."),
}


@pytest.mark.parametrize("quantization", ["int8", "svdquant"])
@pytest.mark.parametrize("change", CHANGES)
def test_one_verb_does_nobody_elses_work_again(change: str, quantization: str, work: Work) -> None:
    pipe = loaded(quantization)
    verb, own = CHANGES[change]
    before, work.written, work.read, work.quantized, work.resolved = hooks(pipe), 0, 0, 0, 0
    verb(pipe)
    assert (work.written, work.read, work.quantized) == (0, 0, 0)
    assert work.resolved <= 1, "a verb decides once"
    assert without(hooks(pipe), own) == without(before, own)
    tiny.run(pipe, FAMILY)
    assert work.written == 0, "the run stores nothing anew either"


@pytest.mark.parametrize("change", [name for name in CHANGES if name not in ("attention on", "compile off")])
def test_no_graph_is_compiled_again(change: str) -> None:
    pipe = loaded()
    if "LoRA" in change:  # a branch that comes or goes is another computation; see the strength below
        CHANGES[change][0](pipe)
        tiny.run(pipe, FAMILY)
        lora(pipe) if change == "LoRA off" else pipe.acceleration.loras.set({"style": 0.5})
        CHANGES[change][0](pipe)
    else:
        CHANGES[change][0](pipe)
    graphs = compile_counts()
    tiny.run(pipe, FAMILY)
    assert compile_counts() == graphs


def test_a_change_of_weights_rebuilds_what_lies_on_them_and_says_so(work: Work) -> None:
    pipe = loaded()
    before = hooks(pipe)
    pipe.disable_quantization()
    assert work.written > 0, "the negative control: the counters count"
    assert any("weights of transformer changed" in note for note in pipe.acceleration.plan.notes)
    assert without(without(hooks(pipe), "offload"), "lora") == without(without(before, "offload"), "lora")
    twin = accelerate(tiny.build(FAMILY), None, **ON["cache"])
    lora(twin)
    assert torch.equal(tiny.run(pipe, FAMILY), tiny.run(twin, FAMILY))


def test_a_merged_lora_rebuilds_the_offload_and_says_so(work: Work) -> None:
    pipe = accelerate(tiny.build(FAMILY), None, **ON["offload"], **ON["cache"])
    work.written = 0
    lora(pipe, merge=True)
    assert work.written > 0
    assert any("offload.layerwise: put on anew" in note for note in pipe.acceleration.plan.notes)
    twin = accelerate(tiny.build(FAMILY), None, **ON["cache"])
    lora(twin, merge=True)
    assert torch.equal(tiny.run(pipe, FAMILY), tiny.run(twin, FAMILY))


# ---- every pair of levers from different slots, in both orders ------------------------------------------------------

LEVERS: dict[str, tuple[str, Verb]] = {
    "int8": ("weight", INT8),
    "svdquant": ("weight", lambda p: p.enable_svdquant()),
    "lora": ("weight", lora),
    "lora merged": ("weight", lambda p: lora(p, merge=True)),
    "compile": ("module", COMPILE),
    "layerwise": ("module", OFFLOAD),
    "stage": ("module", lambda p: p.enable_stage_offload(store="disk")),
    "exact VAE": ("module", VAE),
    "attention": ("call", ATTENTION),
    "cache": ("call", CACHE),
}
OFF: dict[str, Verb] = {
    "int8": lambda p: p.disable_quantization(),
    "svdquant": lambda p: p.disable_quantization(),
    "lora": lambda p: p.acceleration.loras.unload(),
    "lora merged": lambda p: p.acceleration.loras.unload(),
    "compile": lambda p: p.disable_compile(),
    "layerwise": lambda p: p.disable_offload(),
    "stage": lambda p: p.disable_offload(),
    "exact VAE": lambda p: p.disable_vae_tiling(),
    "attention": lambda p: p.disable_attention(),
    "cache": lambda p: p.disable_cache(),
}
PAIRS = [(a, b) for a, b in combinations(LEVERS, 2) if LEVERS[a][0] != LEVERS[b][0]]


def short(pipe: Any) -> torch.Tensor:
    """The picture of three steps."""
    return tiny.run(pipe, FAMILY, num_inference_steps=3)


@cache
def alone(lever: str) -> torch.Tensor:
    """The picture with one lever on."""
    pipe = accelerate(tiny.build(FAMILY), None, compile=False)
    LEVERS[lever][1](pipe)
    return short(pipe)


@pytest.mark.parametrize("pair", PAIRS, ids=[f"{a}-{b}" for a, b in PAIRS])
def test_a_pair_gives_one_picture_in_both_orders_and_comes_off_in_both(pair: tuple[str, str]) -> None:
    pictures = []
    for first, second in (pair, pair[::-1]):
        pipe = tiny.build(FAMILY)
        short(pipe)
        before = snapshot_pipe(pipe)
        accelerate(pipe, None, compile=False)  # no lever is to bring a companion
        LEVERS[first][1](pipe)
        LEVERS[second][1](pipe)
        pictures.append(short(pipe))
        OFF[first](pipe)
        assert torch.equal(short(pipe), alone(second)), "what is left acts as if it had been alone"
        restore(pipe)
        assert_same(before, snapshot_pipe(pipe))
    assert torch.equal(*pictures)


def test_a_lever_that_cannot_be_put_on_leaves_all_others_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = loaded()
    picture, before = tiny.run(pipe, FAMILY), hooks(pipe)

    def broken(*args: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(resolve.__globals__["PLACES"]["attention"].levers["flex"].config(), "attach", broken)
    with pytest.raises(RuntimeError, match="no"):
        pipe.enable_attention("flex")
    assert hooks(pipe) == before
    assert torch.equal(tiny.run(pipe, FAMILY), picture)


def test_a_lever_changed_inside_a_call_is_refused_in_words_that_fit() -> None:
    pipe = accelerate(tiny.build(FAMILY), None)

    def change(*_: Any) -> dict[str, Any]:
        pipe.enable_int8()
        return {}

    with pytest.raises(IncompatibleError, match="quantization: no lever can be changed inside a running call"):
        tiny.run(pipe, FAMILY, callback_on_step_end=change)
    assert pipe.acceleration.plan.enabled == ()
