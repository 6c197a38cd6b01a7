"""Tiny image pipelines: a builder and the arguments of one call for each."""

from __future__ import annotations

from typing import Any

from .parts import TOKENS, embeds, flow, kl, mask, photo, picture, without

# ---- FLUX.1 ------------------------------------------------------------------------------------------

_FLUX_TEXT = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


def flux(pipeline: str, in_channels: int = 16, **more: Any) -> Any:
    """Any pipeline around a FluxTransformer2DModel of two double and two single blocks."""
    import diffusers

    transformer = diffusers.FluxTransformer2DModel(
        in_channels=in_channels,
        out_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    return getattr(diffusers, pipeline)(
        transformer=transformer, vae=kl(), scheduler=flow(shift=3.0), **without(*_FLUX_TEXT), **more
    )


def flux_call(cfg: bool = False, **more: Any) -> dict[str, Any]:
    """Embedded guidance; with `cfg` also true classifier-free guidance, in a second call a step."""
    call: dict[str, Any] = {
        "prompt_embeds": embeds(1, TOKENS, 32),
        "pooled_prompt_embeds": embeds(1, 32),
        "height": 8,
        "width": 8,
    }
    if cfg:
        call |= {"negative_prompt_embeds": embeds(1, TOKENS, 32, seed=1), "true_cfg_scale": 3.0}
        call |= {"negative_pooled_prompt_embeds": embeds(1, 32, seed=1)}
    return call | more


def flux_image() -> dict[str, Any]:
    """An image to start from."""
    return {"image": picture(1, 3, 8, 8)}


def flux_mask() -> dict[str, Any]:
    """An image and the part of it to paint."""
    return flux_image() | {"mask_image": picture(1, 1, 8, 8).round()}


def flux_controlnet() -> Any:
    """FLUX.1 with a ControlNet of one double and one single block."""
    from diffusers import FluxControlNetModel

    controlnet = FluxControlNetModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    return flux("FluxControlNetPipeline", controlnet=controlnet)


# ---- FLUX.2 ------------------------------------------------------------------------------------------


def flux2(pipeline: str) -> Any:
    """FLUX.2 (guidance is an input) or Klein (two calls); the small autoencoder halves the size twice."""
    import diffusers

    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=pipeline == "Flux2Pipeline",
    )
    vae = diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(8,),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    )
    parts = without("text_encoder", "tokenizer")
    return getattr(diffusers, pipeline)(transformer=transformer, vae=vae, scheduler=flow(), **parts)


def flux2_call(**more: Any) -> dict[str, Any]:
    """One call a step."""
    return {"prompt_embeds": embeds(1, TOKENS, 32), "height": 8, "width": 8} | more


def klein_call() -> dict[str, Any]:
    """Two calls a step."""
    return flux2_call(negative_prompt_embeds=embeds(1, TOKENS, 32, seed=1), guidance_scale=3.0)


# ---- Qwen-Image --------------------------------------------------------------------------------------


def qwen(pipeline: str) -> Any:
    """Qwen-Image and its edit form (the picture's tokens follow the latents')."""
    import diffusers

    edits = {"processor": None} if pipeline == "QwenImageEditPipeline" else {}
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    parts = without("text_encoder", "tokenizer") | edits
    return getattr(diffusers, pipeline)(transformer=transformer, vae=vae, scheduler=flow(), **parts)


def qwen_call(**more: Any) -> dict[str, Any]:
    """True guidance: two calls a step, of unequal text length."""
    return {
        "prompt_embeds": embeds(1, TOKENS, 16),
        "prompt_embeds_mask": mask(),
        "negative_prompt_embeds": embeds(1, TOKENS - 2, 16, seed=1),
        "negative_prompt_embeds_mask": mask(TOKENS - 2, TOKENS - 2),
        "true_cfg_scale": 3.0,
        "height": 16,
        "width": 16,
    } | more


def qwen_edit() -> Any:
    """The edit form. It scales every picture to a megapixel, which is more than a test needs."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as module

    module.calculate_dimensions = lambda area, ratio: (16, 16, None)
    return qwen("QwenImageEditPipeline")


def qwen_edit_call() -> dict[str, Any]:
    """A picture to edit."""
    return qwen_call(image=photo(16))


# ---- the others --------------------------------------------------------------------------------------


def z_image() -> Any:
    """Z-Image: two refiners before the stack `layers`."""
    from diffusers import ZImagePipeline, ZImageTransformer2DModel

    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[64, 32, 32],
    )
    parts = without("text_encoder", "tokenizer")
    return ZImagePipeline(transformer=transformer, vae=kl(), scheduler=flow(), **parts)


def z_image_call() -> dict[str, Any]:
    """Lists of embeddings, one [tokens, channels] for each prompt."""
    return {
        "prompt_embeds": [embeds(TOKENS, 16)],
        "negative_prompt_embeds": [embeds(TOKENS, 16, seed=1)],
        "guidance_scale": 4.0,
        "height": 8,
        "width": 8,
    }


def pixart(pipeline: str) -> Any:
    """PixArt-alpha and -sigma: variance is predicted too, so twice the channels come out."""
    import diffusers

    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        out_channels=8,
        num_layers=3,
        cross_attention_dim=32,
        sample_size=8,
        caption_channels=16,
        use_additional_conditions=False,
    )
    parts = without("text_encoder", "tokenizer")
    scheduler = diffusers.DPMSolverMultistepScheduler()
    return getattr(diffusers, pipeline)(transformer=transformer, vae=kl(), scheduler=scheduler, **parts)


def masked_call(channels: int, **more: Any) -> dict[str, Any]:
    """Embeddings with masks, for the pipelines that put both branches into one batch."""
    return {
        "prompt_embeds": embeds(1, TOKENS, channels),
        "prompt_attention_mask": mask(used=6),
        "negative_prompt_embeds": embeds(1, TOKENS, channels, seed=1),
        "negative_prompt_attention_mask": mask(used=4),
        "guidance_scale": 4.0,
    } | more


def pixart_call() -> dict[str, Any]:
    """No size binning: the bins are for a megapixel."""
    return masked_call(16, negative_prompt=None, height=8, width=8, use_resolution_binning=False)


def sana() -> Any:
    """Sana: linear attention and convolutions in the feed-forward."""
    from diffusers import DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=16,
        sample_size=8,
    )
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    parts = without("text_encoder", "tokenizer", "vae")
    return SanaPipeline(transformer=transformer, scheduler=scheduler, **parts)


def sana_call() -> dict[str, Any]:
    """Without its autoencoder the pipeline assumes 32 pixels a latent."""
    return masked_call(16, negative_prompt=None, height=128, width=128, use_resolution_binning=False)


def chroma() -> Any:
    """Chroma: single blocks over joined tokens, modulations from an approximator."""
    from diffusers import ChromaPipeline, ChromaTransformer2DModel

    transformer = ChromaTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )
    parts = without("text_encoder", "tokenizer")
    return ChromaPipeline(transformer=transformer, vae=kl(), scheduler=flow(), **parts)


def chroma_call() -> dict[str, Any]:
    """Two calls a step without cache contexts; a mask of numbers would be added to the attention scores."""
    call = masked_call(16, height=8, width=8)
    return {key: value.bool() if key.endswith("mask") else value for key, value in call.items()}
