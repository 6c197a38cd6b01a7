"""Tiny video pipelines: a builder and the arguments of one call for each."""

from __future__ import annotations

from typing import Any

from .images import masked_call
from .parts import TOKENS, embeds, flow, mask, photo, without

# ---- Wan ---------------------------------------------------------------------------------------------


def wan_transformer(in_channels: int = 16, image_dim: int | None = None) -> Any:
    """Three Wan blocks; with `image_dim` the image-to-video form of Wan 2.1, with its added cross attention."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=in_channels,
        out_channels=16,
        text_dim=16,
        freq_dim=32,
        ffn_dim=48,
        num_layers=3,
        rope_max_seq_len=32,
        image_dim=image_dim,
        added_kv_proj_dim=None if image_dim is None else 32,
    )


def wan(pipeline: str, in_channels: int = 16, image_dim: int | None = None, **more: Any) -> Any:
    """A Wan pipeline with a real causal autoencoder: 8 pixels and 4 frames a latent."""
    import diffusers

    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )
    parts = without("text_encoder", "tokenizer") | more
    transformer = wan_transformer(in_channels, image_dim)
    return getattr(diffusers, pipeline)(transformer=transformer, vae=vae, scheduler=scheduler, **parts)


def wan22() -> Any:
    """Wan 2.2: a second expert takes over below 0.8 of the schedule."""
    return wan("WanPipeline", transformer_2=wan_transformer(), boundary_ratio=0.8)


def wan_call(**more: Any) -> dict[str, Any]:
    """Two branches; the frames are those of two latents."""
    return {
        "prompt_embeds": embeds(1, TOKENS, 16),
        "negative_prompt_embeds": embeds(1, TOKENS, 16, seed=1),
        "guidance_scale": 4.0,
        "height": 32,
        "width": 32,
    } | more


def wan_i2v() -> Any:
    """Wan 2.1 from a picture: its embedding joins the text's, its latents and a mask join the noise."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=24, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    encoder, processor = CLIPVisionModel(config), CLIPImageProcessor(size=8, crop_size=8)
    return wan("WanImageToVideoPipeline", 36, 24, image_encoder=encoder, image_processor=processor)


def wan_i2v_call() -> dict[str, Any]:
    """The first frame."""
    return wan_call(num_frames=5, image=photo(32))


# ---- HunyuanVideo ------------------------------------------------------------------------------------


def hunyuan_video() -> Any:
    """HunyuanVideo: two double and two single blocks, which keep the streams apart."""
    from diffusers import HunyuanVideoPipeline, HunyuanVideoTransformer3DModel

    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 4, 8),
    )
    parts = without("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "vae")
    return HunyuanVideoPipeline(transformer=transformer, scheduler=flow(shift=7.0), **parts)


def hunyuan_video_call() -> dict[str, Any]:
    """Embedded guidance and true guidance at once."""
    return {
        "prompt_embeds": embeds(1, TOKENS, 16),
        "pooled_prompt_embeds": embeds(1, 8),
        "prompt_attention_mask": mask(used=6),
        "negative_prompt_embeds": embeds(1, TOKENS, 16, seed=1),
        "negative_pooled_prompt_embeds": embeds(1, 8, seed=1),
        "negative_prompt_attention_mask": mask(used=4),
        "true_cfg_scale": 3.0,
        "height": 32,
        "width": 32,
        "num_frames": 5,
    }


def hunyuan_video15() -> Any:
    """HunyuanVideo 1.5: guidance through a guider, whose names end up as branches."""
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        HunyuanVideo15Pipeline,
        HunyuanVideo15Transformer3DModel,
    )

    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=9,  # latents and their condition, four channels each, and a mask
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        num_refiner_layers=1,
        text_embed_dim=16,
        text_embed_2_dim=12,
        image_embed_dim=8,
        rope_axes_dim=(4, 4, 8),
    )
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        temporal_compression_ratio=2,
        upsample_match_channel=False,
        downsample_match_channel=False,
    )
    parts = without("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    guider = ClassifierFreeGuidance(guidance_scale=4.0)
    pipe = HunyuanVideo15Pipeline(transformer=transformer, vae=vae, scheduler=flow(), guider=guider, **parts)
    pipe.vision_num_semantic_tokens = 3  # of the (empty) picture in a text-to-video run
    return pipe


def hunyuan_video15_call() -> dict[str, Any]:
    """Embeddings of both text encoders, for both branches."""
    call: dict[str, Any] = {"height": 8, "width": 8, "num_frames": 3}
    for seed, prefix in enumerate(("", "negative_")):
        call |= {f"{prefix}prompt_embeds": embeds(1, TOKENS, 16, seed=seed)}
        call |= {f"{prefix}prompt_embeds_mask": mask(used=6 - seed)}
        call |= {f"{prefix}prompt_embeds_2": embeds(1, 4, 12, seed=seed)}
        call |= {f"{prefix}prompt_embeds_mask_2": mask(4, 2)}
    return call


# ---- LTX ---------------------------------------------------------------------------------------------


def ltx() -> Any:
    """LTX-Video with a real autoencoder (the latents' means are its buffers)."""
    from diffusers import AutoencoderKLLTXVideo, LTXPipeline, LTXVideoTransformer3DModel

    transformer = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=3,
        caption_channels=16,
    )
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=1,
        patch_size_t=1,
    )
    parts = without("text_encoder", "tokenizer")
    return LTXPipeline(transformer=transformer, vae=vae, scheduler=flow(), **parts)


def ltx_call() -> dict[str, Any]:
    """Masked embeddings; both branches in one batch."""
    return masked_call(16, height=32, width=32, num_frames=9)


def ltx2() -> Any:
    """LTX-2: video and audio latents through the same blocks, both read at the end."""
    import diffusers
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=3,
        caption_channels=16,
        rope_double_precision=False,
        rope_type="split",
    )
    connector = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}
    connectors = LTX2TextConnectors(
        caption_channels=16,
        text_proj_in_factor=2,
        connector_rope_base_seq_len=32,
        rope_double_precision=False,
        rope_type="split",
        **{f"{kind}_connector_{key}": value for kind in ("video", "audio") for key, value in connector.items()},
    )
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=1,
        patch_size_t=1,
    )
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4, ch_mult=(1,), num_res_blocks=1, resolution=32, latent_channels=2, mel_bins=8
    )
    parts = without("text_encoder", "tokenizer", "vocoder")
    return diffusers.LTX2Pipeline(
        transformer=transformer, vae=vae, audio_vae=audio_vae, connectors=connectors, scheduler=flow(), **parts
    )


def ltx2_call() -> dict[str, Any]:
    """All three guidances: text (one batch), a perturbed middle block, and isolated modalities."""
    sizes = {"height": 32, "width": 32, "num_frames": 9, "latents": embeds(1, 4, 2, 4, 4)}
    return masked_call(32, spatio_temporal_guidance_blocks=[1], **sizes)


# ---- the others --------------------------------------------------------------------------------------


def cogvideox() -> Any:
    """CogVideoX with its own DDIM."""
    from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel

    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=3,
        sample_width=4,
        sample_height=4,
        sample_frames=5,
        max_text_seq_length=TOKENS,
    )
    parts = without("text_encoder", "tokenizer", "vae")
    return CogVideoXPipeline(transformer=transformer, scheduler=CogVideoXDDIMScheduler(), **parts)


def cogvideox_call() -> dict[str, Any]:
    """Both branches in one batch, named by the pipeline."""
    return {
        "prompt_embeds": embeds(1, TOKENS, 16),
        "negative_prompt_embeds": embeds(1, TOKENS, 16, seed=1),
        "guidance_scale": 4.0,
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "max_sequence_length": TOKENS,
    }


def mochi() -> Any:
    """Mochi: its last block leaves the text stream as it is."""
    from diffusers import MochiPipeline, MochiTransformer3DModel

    transformer = MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=8,
        max_sequence_length=TOKENS,
    )
    parts = without("text_encoder", "tokenizer", "vae")
    return MochiPipeline(transformer=transformer, scheduler=flow(invert_sigmas=True), **parts)


def mochi_call() -> dict[str, Any]:
    """Without its autoencoder the pipeline assumes 8 pixels and 6 frames a latent."""
    return masked_call(16, height=32, width=32, num_frames=7)
