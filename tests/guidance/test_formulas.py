"""Guidance formulas other than u + s (c - u): rescaled, normalised, projected, with an optimised scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import AdaptiveProjectedGuidance, ClassifierFreeGuidance, ClassifierFreeZeroStarGuidance

from tests.models.families.table import build, run

from .helpers import done, reuse

GUIDERS = [
    ClassifierFreeGuidance(guidance_scale=4.0, guidance_rescale=0.7),
    ClassifierFreeGuidance(guidance_scale=4.0, use_original_formulation=True),
    ClassifierFreeZeroStarGuidance(guidance_scale=4.0, zero_init_steps=0),
    AdaptiveProjectedGuidance(guidance_scale=4.0, adaptive_projected_guidance_rescale=5.0),
]


@pytest.mark.parametrize("guider", GUIDERS, ids=lambda guider: type(guider).__name__)
def test_guiders(guider: Any) -> None:
    """With u = c every formula gives c (to rounding); with reuse it gives something near what it gives in full."""
    plain = build("hunyuan_video15")
    plain.guider = ClassifierFreeGuidance(guidance_scale=1.0)
    (unguided,) = run(plain, "hunyuan_video15")
    plain.guider = guider
    (full,) = run(plain, "hunyuan_video15")
    reuse(plain, end=0.0)
    (off,) = run(plain, "hunyuan_video15")
    assert done(plain) == (0, 0, 4)
    torch.testing.assert_close(off, unguided, atol=1e-4, rtol=0)
    reuse(plain)
    (near,) = run(plain, "hunyuan_video15")
    assert done(plain) == (2, 2, 0)
    assert 0 < (near - full).abs().max() < (unguided - full).abs().max()


FORMULAS = [
    ("ltx", {"guidance_rescale": 0.7}, {"guidance_scale": 1.0}),
    ("qwen", {}, {"true_cfg_scale": 1.0}),  # the mix is brought to the norm of c
    ("z_image", {"cfg_normalization": True}, {"guidance_scale": 0.0}),
]


@pytest.mark.parametrize(("name", "more", "unguided"), FORMULAS)
def test_rescaled_and_normalised_guidance(name: str, more: dict[str, Any], unguided: dict[str, Any]) -> None:
    """Without guidance they give what the unguided pipeline gives."""
    pipe = build(name)
    expected = run(pipe, name, **unguided)
    assert not torch.equal(run(pipe, name, **more)[0], expected[0])
    found = run(reuse(pipe, end=0.0), name, **more)
    assert done(pipe) == (0, 0, 4)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
