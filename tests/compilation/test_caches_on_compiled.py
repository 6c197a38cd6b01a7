"""C60, C61 and fault 16 of cache-dit: step caches of every scope on compiled blocks and compiled denoisers.

The first-block cache and the regional lever by themselves are in tests/compilation and invariants/test_8_chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from diffaccel import accelerate, restore
from diffaccel.errors import IncompatibleError
from tests import tiny
from tests.caching.settings import cached, latents, options, plain_latents, strip
from tests.invariants.levers import second_size

STEPS = {"num_inference_steps": 4}


@pytest.fixture
def graphs() -> Iterator[Callable[[], int]]:
    """A clean torch.compile; the number of graphs it has made so far."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def close(result: torch.Tensor, reference: torch.Tensor) -> None:
    """Equal to rounding."""
    torch.testing.assert_close(result, reference, atol=1e-5, rtol=0)


def compile_blocks(pipe: Any) -> Any:
    """As users do it."""
    pipe.transformer.compile_repeated_blocks(backend="eager")
    return pipe


def test_blocks_compiled_before_or_after_the_cache(graphs: Callable[[], int]) -> None:
    """Comfy-WaveSpeed#131: blocks compiled before or after the cache, two sizes: right, no graph more than plain."""
    calls = [STEPS | size | tiny.no_guidance("wan") for size in ({}, second_size("wan"))]
    pipe = compile_blocks(tiny.build("wan"))
    for call in calls:
        close(latents(pipe, "wan", **call), plain_latents("wan", **call))
    made = graphs()
    assert made > 0
    for method in ("dbcache", "taylorseer lite", "delta_dit"):
        twin = cached("wan", method)
        expected = [(latents(twin, "wan", **call), strip(twin)) for call in calls]
        assert all("." in found["cond"] for _, found in expected)
        first = accelerate(compile_blocks(tiny.build("wan")), preset=None, strict=True, **options("wan", method))
        for one in (first, compile_blocks(cached("wan", method))):
            for call, (reference, found) in zip(calls, expected, strict=True):
                close(latents(one, "wan", **call), reference)
                assert strip(one) == found
            restore(one)
            close(latents(one, "wan", **calls[0]), plain_latents("wan", **calls[0]))
    assert graphs() == made, "blocks are compiled whole, once, whatever stands around them"


def test_modules_inside_compiled_blocks_are_refused(graphs: Callable[[], int]) -> None:
    """Modules cannot be left out of a block that is one graph: refused by name, with what to do."""
    pipe = compile_blocks(tiny.build("wan"))
    with pytest.raises(IncompatibleError, match="use_lite_mode=True"):
        accelerate(pipe, preset=None, strict=True, **options("wan", "taylorseer modules"))
    pipe = accelerate(tiny.build("wan"), preset=None, compile=True, compile_backend="eager")
    with pytest.raises(IncompatibleError, match="leave compile off"):
        pipe.enable_taylorseer(use_lite_mode=False)
    assert graphs() == 0 and pipe.acceleration.plan.enabled == ("compile",)


@pytest.mark.parametrize("method", ["first_block", "taylorseer lite"])
def test_the_denoiser_compiled_as_a_whole(method: str, graphs: Callable[[], int]) -> None:
    """cache-dit made 8 graphs of a FLUX of 1 + 2 blocks, diffusers 8 and 2 more in the second call."""

    def built() -> Any:
        pipe = tiny.build("flux")
        del pipe.transformer.transformer_blocks[1]
        return accelerate(pipe, preset=None, strict=True, **options("flux", method))

    twin, pipe = built(), built()
    reference, found = latents(twin, "flux", **STEPS), strip(twin)
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    close(latents(pipe, "flux", **STEPS), reference)
    assert strip(pipe) == found and "." in found["cond"]
    made = graphs()
    assert 0 < made <= 10, "not more than diffusers, and all of them in the first call"
    with torch._dynamo.config.patch(error_on_recompile=True):
        close(latents(pipe, "flux", **STEPS), reference)
    assert graphs() == made, "a second identical call compiled again"


def test_a_new_size_compiles_nothing_anew(graphs: Callable[[], int]) -> None:
    """diffusers#14297: first as many tokens as channels (32), then more: nothing is compiled anew."""
    call: dict[str, Any] = STEPS | tiny.no_guidance("wan") | {"num_frames": 13, "width": 64}
    pipe = tiny.build("wan")
    wish = options("wan", "dbcache") | {"compile": True, "compile_backend": "eager", "compile_dynamic": True}
    accelerate(pipe, preset=None, strict=True, **wish)
    latents(pipe, "wan", height=32, **call)
    made = graphs()
    with torch._dynamo.config.patch(error_on_recompile=True):
        result = latents(pipe, "wan", height=64, **call)
    assert graphs() == made > 0
    close(result, latents(cached("wan", "dbcache"), "wan", height=64, **call))
    assert "." in strip(pipe)["cond"]
