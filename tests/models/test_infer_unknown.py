"""Inference on denoisers of diffusers that have no card: what their source says, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import pytest
import torch

from diffaccel import accelerate, restore
from diffaccel.models import CARDS, ModelSpec, lookup, registry
from diffaccel.models.infer import Refusal, infer, record

from .. import tiny
from . import test_families
from .families import table
from .families.images import masked_call
from .families.parts import embeds, flow, kl, without
from .families.table import Family, build, run

Arguments = Callable[[int], dict[str, Any]]  # of the denoiser, by seed
DOUBLE = ("hidden_states", "encoder_hidden_states")


def _text(seed: int) -> torch.Tensor:
    return embeds(1, 6, 8, seed=seed)


def _image(seed: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_states": embeds(1, 4, 8, 8, seed=seed),
        "encoder_hidden_states": _text(seed + 9),
        "timestep": torch.tensor([5.0 - seed]),
    } | more


def _video(seed: int, **more: Any) -> dict[str, Any]:
    return _image(seed) | {"hidden_states": embeds(1, 4, 2, 4, 4, seed=seed)} | more


def auraflow_transformer() -> Any:
    """Joint blocks, then single blocks over both streams joined."""
    return diffusers.AuraFlowTransformer2DModel(
        sample_size=8,
        num_mmdit_layers=2,
        num_single_dit_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=16,
        pos_embed_max_size=64,
    )


def _cogview4() -> Any:
    return diffusers.CogView4Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=8,
        time_embed_dim=8,
        condition_dim=4,
        rope_axes_dim=(8, 8),
        sample_size=8,
    )


def _cogview4_call(seed: int) -> dict[str, Any]:
    sizes = {"original_size": [[8, 8]], "target_size": [[8, 8]], "crop_coords": [[0, 0]]}
    return _image(seed, **{name: torch.tensor(size) for name, size in sizes.items()})


def _lumina2() -> Any:
    return diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=24,
        num_layers=3,
        num_attention_heads=3,
        num_kv_heads=1,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(32, 32, 32),
        cap_feat_dim=8,
        multiple_of=8,
    )


def _kandinsky5() -> Any:
    return diffusers.Kandinsky5Transformer3DModel(
        in_text_dim=8,
        in_text_dim2=8,
        time_dim=16,
        model_dim=16,
        ff_dim=32,
        num_visual_blocks=3,
        axes_dims=(4, 2, 2),
    )


def _kandinsky5_call(seed: int) -> dict[str, Any]:
    two = torch.arange(2)
    return _video(
        seed,
        hidden_states=embeds(1, 2, 4, 4, 4, seed=seed),
        pooled_projections=embeds(1, 8, seed=seed),
        visual_rope_pos=[two, two, two],
        text_rope_pos=torch.arange(6),
    )


def _hunyuan_dit() -> Any:
    return diffusers.HunyuanDiT2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=2,
        hidden_size=16,
        cross_attention_dim=8,
        cross_attention_dim_t5=8,
        text_len=6,
        text_len_t5=6,
        use_style_cond_and_image_meta_size=False,
    )


def _hunyuan_dit_call(seed: int) -> dict[str, Any]:
    masks = {"text_embedding_mask": torch.ones(1, 6), "text_embedding_mask_t5": torch.ones(1, 6)}
    rope = [torch.ones(16, 8), torch.zeros(16, 8)]
    return _image(seed, encoder_hidden_states_t5=_text(seed), image_rotary_emb=rope, **masks)


def _latte() -> Any:
    return diffusers.LatteTransformer3DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=8,
        in_channels=4,
        cross_attention_dim=16,
        out_channels=8,
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        video_length=2,
    )


def _unet() -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        cross_attention_dim=8,
        norm_num_groups=4,
        attention_head_dim=4,
    )


def _unet_call(seed: int) -> dict[str, Any]:
    return {"sample": embeds(1, 4, 8, 8, seed=seed), "timestep": 5, "encoder_hidden_states": _text(seed)}


KNOWABLE: list[tuple[Callable[[], Any], Arguments, list[tuple[Any, ...]], str]] = [
    (
        auraflow_transformer,
        _image,
        [
            ("joint_transformer_blocks", DOUBLE[::-1], ()),
            ("single_transformer_blocks", DOUBLE[:1], DOUBLE[::-1]),
        ],
        "hidden_states",
    ),
    (_cogview4, _cogview4_call, [("transformer_blocks", DOUBLE, ())], "hidden_states"),
    (
        _lumina2,
        partial(_image, encoder_attention_mask=torch.ones(1, 6, dtype=torch.bool)),
        [("layers", DOUBLE[:1], ())],
        "hidden_states",
    ),
    (_kandinsky5, _kandinsky5_call, [("visual_transformer_blocks", ("visual_embed",), ())], "visual_embed"),
    (_hunyuan_dit, _hunyuan_dit_call, [("blocks", DOUBLE[:1], ())], "hidden_states"),
]


def traced(make: Callable[[], Any], arguments: Arguments) -> ModelSpec | Refusal:
    with torch.random.fork_rng(devices=[]):
        model = make().eval()
    assert type(model).__name__ not in [name for card in CARDS.values() for name in card.classes if not card.no_stack]
    with record(model) as trace, torch.no_grad():
        for seed in range(2):
            model(**arguments(seed))
    return infer(trace)


@pytest.mark.parametrize(("make", "arguments", "stack", "stream"), KNOWABLE)
def test_what_the_source_says(
    make: Callable[[], Any], arguments: Arguments, stack: list[tuple[Any, ...]], stream: str
) -> None:
    found = traced(make, arguments)
    assert isinstance(found, ModelSpec), found
    assert [(row.attribute, row.outputs, row.joins) for row in found.stack] == stack
    assert (found.stream, found.reads) == (stream, ())


@pytest.mark.parametrize(
    ("make", "arguments", "reason"),
    [
        (_latte, _video, "blocks of transformer_blocks ran in the order 0"),
        (_unet, _unet_call, "result 1 of down_blocks 0 is not a stream of block 1"),
    ],
)
def test_refusals(make: Callable[[], Any], arguments: Arguments, reason: str) -> None:
    """Two lists that take turns, a U-Net."""
    found = traced(make, arguments)
    assert isinstance(found, Refusal) and reason in found.reason
    assert "order of the first call" in found.seen


def test_an_inferred_spec_carries_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """AuraFlow, with what was inferred in place of a card: hits, and the right answer on a repeated call."""

    def pipeline() -> Any:
        parts = without("text_encoder", "tokenizer")
        return diffusers.AuraFlowPipeline(transformer=auraflow_transformer(), vae=kl(), scheduler=flow(), **parts)

    call = partial(masked_call, 8, height=8, width=8)
    monkeypatch.setitem(table.FAMILIES, "auraflow", Family("auraflow", pipeline, call, ("cond",)))
    pipe = build("auraflow")
    assert lookup(pipe).family == "unknown"
    with record(pipe.transformer) as trace:
        run(pipe, "auraflow")
    found = infer(trace)
    assert isinstance(found, ModelSpec), found
    monkeypatch.setitem(registry.CARDS, found.family, found)
    test_families.test_a_repeated_call_is_reused_and_gives_the_same_answer("auraflow")
    test_families.test_hits_skip_all_blocks_but_the_first("auraflow")


def test_the_blocks_of_an_unknown_model_are_learnt_from_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """AuraFlow through the public API: run 1 is plain and is watched, run 2 has the cache; restore undoes it all."""

    def pipeline() -> Any:
        parts = without("text_encoder", "tokenizer")
        return diffusers.AuraFlowPipeline(transformer=auraflow_transformer(), vae=kl(), scheduler=flow(), **parts)

    call = partial(masked_call, 8, height=8, width=8)
    monkeypatch.setitem(table.FAMILIES, "auraflow", Family("auraflow", pipeline, call, ("cond",)))
    pipe = build("auraflow")
    [plain] = run(pipe, "auraflow")
    accelerate(pipe, None, cache="first_block", cache_threshold=1e9, cache_min_steps=0)
    first = pipe.acceleration.plan.item("cache.first_block")
    assert first.status == "skipped" and "learnt in the next run" in first.reason
    assert torch.equal(run(pipe, "auraflow")[0], plain), "recording changes nothing"
    assert pipe.acceleration.report.hit_rate == 0
    assert not torch.equal(run(pipe, "auraflow")[0], plain)
    assert pipe.acceleration.plan.item("cache.first_block").status == "enabled"
    assert pipe.acceleration.report.hit_rate > 0
    assert "planned anew" in pipe.acceleration.plan.notes[-1]
    restore(pipe)
    assert torch.equal(run(pipe, "auraflow")[0], plain)
    accelerate(pipe, None, cache="first_block")
    assert pipe.acceleration.plan.item("cache.first_block").status == "enabled", "known as long as the model lives"
    restore(pipe)


def test_what_cannot_be_learnt_is_refused_with_what_was_seen() -> None:
    """A small U-Net of Stable Diffusion 1: one run, then a reason instead of a promise."""
    pipe = tiny.build("sdxl")
    pipe.unet.register_to_config(addition_embed_type="none")  # what tells the card apart: now an unknown U-Net
    assert lookup(pipe).family == "unknown"
    plain = tiny.run(pipe, "sdxl")
    accelerate(pipe, None, cache="first_block")
    assert torch.equal(tiny.run(pipe, "sdxl"), plain)
    assert torch.equal(tiny.run(pipe, "sdxl"), plain)
    item = pipe.acceleration.plan.item("cache.first_block")
    assert item.status == "skipped" and "could not be learnt" in item.reason and "Seen:" in item.reason
    restore(pipe)
