"""Against loops written by hand, on the denoiser, scheduler and text encoder of plain diffusers pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests import tiny

from .helpers import done, reuse, strips

STEPS, SCALE = 8, 4.0
COMMON = {"num_inference_steps": STEPS, "guidance_scale": SCALE, "output_type": "latent"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits are compared, so every run adds up in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def noise(family: str) -> torch.Tensor:
    """Where a call starts."""
    shape = (2, 16, 2, 4, 4) if family == "wan" else (2, 4, 8, 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


class Difference:
    """Straight-line reuse: the differences of the last computed steps, and a line through two of them."""

    def __init__(self, computed: list[int], order: int) -> None:
        self.computed, self.order, self.known = computed, order, []  # type: ignore[var-annotated]

    def missing(self, step: int) -> bool:
        """Is the unconditional branch left out at this step?"""
        return step not in self.computed

    def learn(self, step: int, cond: torch.Tensor, uncond: torch.Tensor) -> None:
        """A computed step."""
        self.known.append((step, cond - uncond))

    def uncond(self, step: int, cond: torch.Tensor) -> torch.Tensor:
        """What stands for the unconditional output."""
        if self.order == 0 or len(self.known) == 1:
            return cond - self.known[-1][1]
        (a, old), (b, new) = self.known[-2:]
        return cond - (new + (old - new) * ((step - b) / (a - b)))


@torch.no_grad()
def by_hand_wan(pipe: Any, reused: Difference) -> torch.Tensor:
    prompt, negative = pipe.encode_prompt(
        list(tiny.PROMPTS[:2]), ["grey"] * 2, max_sequence_length=tiny.TEXT_TOKENS, device=torch.device("cpu")
    )
    latents = noise("wan")
    pipe.scheduler.set_timesteps(STEPS)
    for step, t in enumerate(pipe.scheduler.timesteps):
        both = {"hidden_states": latents, "timestep": t.expand(2), "return_dict": False}
        cond = pipe.transformer(encoder_hidden_states=prompt, **both)[0]
        if reused.missing(step):
            uncond = reused.uncond(step, cond)
        else:
            uncond = pipe.transformer(encoder_hidden_states=negative, **both)[0]
            reused.learn(step, cond, uncond)
        latents = pipe.scheduler.step(uncond + SCALE * (cond - uncond), t, latents, return_dict=False)[0]
    return latents


@torch.no_grad()
def by_hand_sd3(pipe: Any, reused: Difference) -> torch.Tensor:
    prompt, negative, pooled, negative_pooled = pipe.encode_prompt(
        list(tiny.PROMPTS[:2]), None, None, negative_prompt=["grey"] * 2, max_sequence_length=tiny.TEXT_TOKENS
    )
    latents = noise("sd3")
    pipe.scheduler.set_timesteps(STEPS)
    for step, t in enumerate(pipe.scheduler.timesteps):
        if reused.missing(step):
            cond = pipe.transformer(latents, prompt, pooled, t.expand(2), return_dict=False)[0]
            uncond = reused.uncond(step, cond)
        else:
            texts, pools = torch.cat([negative, prompt]), torch.cat([negative_pooled, pooled])
            whole = pipe.transformer(torch.cat([latents] * 2), texts, pools, t.expand(4), return_dict=False)[0]
            uncond, cond = whole.chunk(2)
            reused.learn(step, cond, uncond)
        latents = pipe.scheduler.step(uncond + SCALE * (cond - uncond), t, latents, return_dict=False)[0]
    return latents


@torch.no_grad()
def by_hand_sdxl(pipe: Any, reused: Difference) -> torch.Tensor:
    prompt, negative, pooled, negative_pooled = pipe.encode_prompt(
        list(tiny.PROMPTS[:2]), negative_prompt=["grey"] * 2, do_classifier_free_guidance=True, device="cpu"
    )
    ids = torch.tensor([[16.0, 16, 0, 0, 16, 16]]).repeat(2, 1)
    pipe.scheduler.set_timesteps(STEPS)
    latents = noise("sdxl") * pipe.scheduler.init_noise_sigma
    for step, t in enumerate(pipe.scheduler.timesteps):
        scaled = pipe.scheduler.scale_model_input(latents, t)
        if reused.missing(step):
            added = {"text_embeds": pooled, "time_ids": ids}
            cond = pipe.unet(scaled, t, prompt, added_cond_kwargs=added, return_dict=False)[0]
            uncond = reused.uncond(step, cond)
        else:
            added = {"text_embeds": torch.cat([negative_pooled, pooled]), "time_ids": torch.cat([ids] * 2)}
            texts = torch.cat([negative, prompt])
            whole = pipe.unet(torch.cat([scaled] * 2), t, texts, added_cond_kwargs=added, return_dict=False)[0]
            uncond, cond = whole.chunk(2)
            reused.learn(step, cond, uncond)
        latents = pipe.scheduler.step(uncond + SCALE * (cond - uncond), t, latents, return_dict=False)[0]
    return latents


BY_HAND = {"wan": by_hand_wan, "sd3": by_hand_sd3, "sdxl": by_hand_sdxl}
CASES = [
    ({"interval": 2}, [0, 2, 4, 6], 0),
    ({"interval": 3, "order": 1, "last_steps": 1}, [0, 3, 6, 7], 1),
    ({"schedule": "11010010", "order": 1}, [0, 1, 3, 6], 1),
    ({"schedule": [0, 5]}, [0, 5], 0),
]


def run(pipe: Any, family: str) -> torch.Tensor:
    """The pipeline's own loop over two prompts."""
    call = {"prompt": list(tiny.PROMPTS[:2]), "negative_prompt": ["grey"] * 2, "latents": noise(family)}
    return tiny.run(pipe, family, **call, **COMMON)


@contextmanager
def forwards(model: torch.nn.Module) -> Iterator[list[int]]:
    """Rows of every forward of the denoiser."""
    seen: list[int] = []

    def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(len(args[0] if args else kwargs["hidden_states"]))

    # Inside of the accelerated forward: the first layer of every denoiser sees what is really run.
    inner = next(m for name, m in model.named_modules() if name in ("patch_embedding", "pos_embed", "conv_in"))
    handle = inner.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("family", "options", "computed", "order"),
    [("wan", *case) for case in CASES] + [(family, *case) for family in ("sd3", "sdxl") for case in CASES[::2]],
)
def test_same_latents(family: str, options: dict[str, Any], computed: list[int], order: int) -> None:
    expected = BY_HAND[family](tiny.build(family), Difference(computed, order))
    pipe = reuse(tiny.build(family), **options)
    with forwards(tiny.denoiser(pipe)) as seen:
        found = run(pipe, family)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)  # the line is added up otherwise
    if order == 0:
        assert torch.equal(found, expected)
    assert done(pipe) == (len(computed), STEPS - len(computed), 0)
    if family == "wan":
        assert seen == [2] * (STEPS + len(computed))
        assert strips(pipe)["uncond"] == "".join("C" if step in computed else "." for step in range(STEPS))
    else:
        assert seen == [4 if step in computed else 2 for step in range(STEPS)]
        assert {k: len(v) for k, v in strips(pipe).items()} == {
            "cond_uncond": len(computed), "cond": STEPS - len(computed)
        }  # fmt: skip


@pytest.mark.parametrize("family", ["wan", "sd3"])
def test_negative_control(family: str) -> None:
    """The comparison can fail: another schedule, another order and no reuse at all give other latents."""
    found = run(reuse(tiny.build(family), interval=3), family)
    for computed, order in (([0, 2, 4, 6], 0), ([0, 3, 6], 1), (list(range(STEPS)), 0)):
        other = BY_HAND[family](tiny.build(family), Difference(computed, order))
        assert (found - other).abs().max() > 1e-5
    assert torch.equal(found, BY_HAND[family](tiny.build(family), Difference([0, 3, 6], 0)))


@pytest.mark.parametrize("family", ["wan", "sd3", "sdxl", "flux"])
def test_no_guidance_anywhere_is_the_unguided_call(family: str) -> None:
    """An empty guidance interval gives, bit for bit, what the pipeline gives when guidance is not asked for."""
    pipe = reuse(tiny.build(family), start=0.0, end=0.0)
    found = tiny.run(pipe, family, **({"true_cfg": True} if family == "flux" else {}))
    assert torch.equal(found, tiny.run(tiny.build(family), family, **tiny.no_guidance(family)))
    assert done(pipe) == (0, 0, tiny.STEPS)


def test_guidance_in_an_interval_by_hand() -> None:
    """Guidance on for the middle steps only; where it is off the unconditional call is not made."""
    pipe = tiny.build("wan")
    expected = _interval_by_hand(pipe, [2, 3, 4, 5])
    found = run(pipe := reuse(tiny.build("wan"), interval=1, start=0.25, end=0.75), "wan")
    assert torch.equal(found, expected)
    assert strips(pipe) == {"cond": "C" * STEPS, "uncond": "..CCCC.."} and done(pipe) == (4, 0, 4)
    sigmas = pipe.scheduler.sigmas[:STEPS].tolist()
    bounds = {"sigma_high": sigmas[2], "sigma_low": sigmas[6]}
    assert torch.equal(run(reuse(tiny.build("wan"), interval=1, **bounds), "wan"), expected)
    assert not torch.equal(expected, _interval_by_hand(tiny.build("wan"), [1, 2, 3, 4, 5]))


@torch.no_grad()
def _interval_by_hand(pipe: Any, guided: list[int]) -> torch.Tensor:
    prompt, negative = pipe.encode_prompt(
        list(tiny.PROMPTS[:2]), ["grey"] * 2, max_sequence_length=tiny.TEXT_TOKENS, device=torch.device("cpu")
    )
    latents = noise("wan")
    pipe.scheduler.set_timesteps(STEPS)
    for step, t in enumerate(pipe.scheduler.timesteps):
        both = {"hidden_states": latents, "timestep": t.expand(2), "return_dict": False}
        mixed = pipe.transformer(encoder_hidden_states=prompt, **both)[0]
        if step in guided:
            uncond = pipe.transformer(encoder_hidden_states=negative, **both)[0]
            mixed = uncond + SCALE * (mixed - uncond)
        latents = pipe.scheduler.step(mixed, t, latents, return_dict=False)[0]
    return latents
