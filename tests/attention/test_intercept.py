"""The interception: bit-equal where nobody answers, all of the attention goes through it, and nothing of it stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from diffaccel import accelerate, attach, restore
from diffaccel.attention import intercept as seams
from diffaccel.attention.calls import Inputs, Where, with_lse
from diffaccel.attention.intercept import Interception, blind
from diffaccel.attention.processors import form
from tests import fingerprint, tiny
from tests.models.families import table

FAMILIES = (
    "chroma", "cogvideox", "flux_cfg", "flux2_klein_kv", "hunyuan_video", "hunyuan_video15", "ltx", "mochi",
    "pixart_sigma", "qwen", "sana", "sd3", "wan_i2v", "z_image",
)  # fmt: skip
VIDEO = {  # frames, rows and columns of the tokens of the standard call, and whether text stands among them
    "cogvideox": ((2, 2, 2), True),
    "hunyuan_video": ((2, 2, 2), True),
    "hunyuan_video15": ((2, 4, 4), True),
    "ltx": ((3, 8, 8), False),
    "mochi": ((2, 2, 2), True),
    "wan_i2v": ((2, 2, 2), False),
}

Handler = Callable[[Where, Inputs, Callable[[], Any]], Any]


@contextmanager
def opened(pipe: Any, handler: Handler) -> Iterator[list[Interception]]:
    """Seams with `handler` on every denoiser of an accelerated pipeline."""
    stack = pipe.acceleration.stack
    found = []
    for component, root in stack.roots.items():
        found.append(Interception(stack.modules[component], stack.target.spec, handler).open(root))
    try:
        yield found
    finally:
        for interception in found:
            interception.close()


def passing(seen: list[Where]) -> Handler:
    """A handler that notes the calls and answers none."""

    def handler(where: Where, inputs: Inputs, plain: Callable[[], Any]) -> Any:
        assert inputs.q.shape[-1] == inputs.k.shape[-1] and inputs.k.shape[:3] == inputs.v.shape[:3]
        seen.append(where)
        return plain()

    return handler


def halving(where: Where, inputs: Inputs, plain: Callable[[], Any]) -> Any:
    """The negative control: what it answers must show."""
    return plain() * 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_bit_equal_and_complete(family: str) -> None:
    reference = table.run(table.build(family), family)[0]
    pipe = table.build(family)
    attach(pipe)
    calls = [0]
    seen: list[Where] = []
    with opened(pipe, passing(seen)) as found:
        denoiser = found[0].module
        intercepted = [m for m in denoiser.modules() if form(getattr(m, "processor", None)) is not None]
        for module in intercepted:
            module.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
        assert torch.equal(table.run(pipe, family)[0], reference)
        assert len(seen) >= calls[0] > 0, "some attention went past the interception"
        layers = {where.layer for where in seen if where.layer >= 0}
        assert layers == set(range(found[0].layers))
    shapes = {(w.geometry.shape, w.geometry.text > 0) for w in seen if w.geometry is not None}
    assert shapes == ({VIDEO[family]} if family in VIDEO else set())
    with opened(pipe, halving):
        assert not torch.equal(table.run(pipe, family)[0], reference)
    assert torch.equal(table.run(pipe, family)[0], reference)


@pytest.mark.parametrize("family", ["cogvideox", "flux_cfg", "hunyuan_video", "ltx", "mochi", "sd3", "wan_i2v"])
def test_whole_graphs_that_are_never_compiled_again(family: str) -> None:
    """The handler changes its mind from call to call: graphs stay whole and as they are."""
    pipe = table.build(family)
    reference = table.run(table.build(family), family)[0]
    attach(pipe).enable_compile(backend="eager", fullgraph=True)
    seen: list[Where] = []
    torch._dynamo.reset()
    with opened(pipe, passing(seen)):
        assert torch.equal(table.run(pipe, family)[0], reference)
        one = len(seen)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(table.run(pipe, family)[0], reference)
        assert len(seen) == 2 * one > 0
    restore(pipe)


def test_another_handler_needs_no_new_graph() -> None:
    pipe = attach(tiny.build("wan")).enable_compile(backend="eager", fullgraph=True)
    torch._dynamo.reset()
    with opened(pipe, passing([])) as found:
        plain = tiny.run(pipe, "wan")
        with torch._dynamo.config.patch(error_on_recompile=True):
            found[0].handler = halving
            assert not torch.equal(tiny.run(pipe, "wan"), plain)
            found[0].handler = passing([])
            assert torch.equal(tiny.run(pipe, "wan"), plain)
    restore(pipe)


def test_layers_steps_and_branches_are_known() -> None:
    pipe = attach(tiny.build("wan22"))
    seen: list[Where] = []
    with opened(pipe, passing(seen)):
        tiny.run(pipe, "wan22", num_inference_steps=4)
    assert {w.call.component for w in seen} == {"transformer", "transformer_2"}
    assert {(w.call.step, w.call.branch) for w in seen} == {(s, b) for s in range(4) for b in ("cond", "uncond")}
    assert {w.name for w in seen if w.cross} == {f"blocks.{i}.attn2" for i in range(seen[0].layers)}
    assert all(w.layer == int(w.name.split(".")[1]) for w in seen)


@pytest.mark.parametrize("family", ["wan", "sd3", "flux"])
def test_nothing_stays(family: str) -> None:
    pipe = tiny.build(family)
    tiny.run(pipe, family)
    before = fingerprint.snapshot_pipe(pipe)
    attach(pipe)
    with opened(pipe, halving):
        processor = next(m.processor for m in tiny.denoiser(pipe).modules() if hasattr(m, "processor"))
        name = type(processor).__name__
        assert type(processor).__mro__[1].__name__ == name, "the subclass carries the name of the class"
        tiny.run(pipe, family)
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


def test_only_the_runs_of_its_own_pipeline() -> None:
    """C46: a plain pipeline on the same model, a call by hand and another model of the class see nothing."""
    pipe, other = tiny.build("wan"), tiny.build("wan")
    reference = tiny.run(other, "wan")
    twin = type(pipe)(**pipe.components)
    attach(pipe)
    with opened(pipe, halving):
        assert not torch.equal(tiny.run(pipe, "wan"), reference)
        assert torch.equal(tiny.run(twin, "wan"), reference)
        assert torch.equal(tiny.run(other, "wan"), reference)


def test_processors_that_are_set_later_are_followed() -> None:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    pipe = accelerate(tiny.build("wan"), None, attention="flex")
    tiny.run(pipe, "wan")
    for block in pipe.transformer.blocks:
        block.attn1.set_processor(WanAttnProcessor())
    tiny.run(pipe, "wan")
    calls = pipe.acceleration.report.stats["attention.flex"]["calls"]["flex"]
    assert calls == len(pipe.acceleration.report.steps) * 2 * len(pipe.transformer.blocks)
    restore(pipe)
    assert all(type(block.attn1.processor) is WanAttnProcessor for block in pipe.transformer.blocks)


def test_what_cannot_be_intercepted_is_known() -> None:
    pipe = table.build("sana")
    assert blind(pipe.transformer) == [f"transformer_blocks.{i}.attn1" for i in range(3)]  # linear attention


@pytest.mark.parametrize("masked", [False, True])
def test_log_sum_exp(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 3, 16, generator=generator, dtype=torch.float64) for n in (37, 51, 51))
    mask = torch.rand(2, 1, 37, 51, generator=generator) > 0.4 if masked else None
    output, lse = with_lse(Inputs(q, k, v, mask), torch.zeros(1), rows=8)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-5) and output.numel() == 1


def test_the_enum_and_the_registry_stay_untouched() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    names, registered = list(AttentionBackendName), dict(_AttentionBackendRegistry._backends)
    pipe = accelerate(tiny.build("wan"), None, attention="flex")
    tiny.run(pipe, "wan")
    assert list(AttentionBackendName) == names and dict(_AttentionBackendRegistry._backends) == registered
    assert F.scaled_dot_product_attention is not seams._sdpa
    restore(pipe)
