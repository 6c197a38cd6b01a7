"""What the loops of modular pipelines need, tiny: their components, and the arguments of one call.

Guiders and small processors come from their config; embeddings and latents stand for what encoders make.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.models.families import images, videos
from tests.models.families.parts import TOKENS, embeds, flow, mask

STEPS = 6


def flux3(distilled: bool = False) -> dict[str, Any]:
    from diffusers import Flux3Transformer2DModel

    transformer = Flux3Transformer2DModel(
        in_channels=8,
        cond_in_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        flow_map=distilled,
    )
    return {"transformer": transformer, "scheduler": flow(shift=3.0)}


def prompts(dim: int, negative: bool = True, **more: Any) -> dict[str, Any]:
    call = {"prompt_embeds": embeds(1, TOKENS, dim), **more}
    return call | {"negative_prompt_embeds": embeds(1, TOKENS, dim, seed=1)} if negative else call


def masked(dim: int, negative: bool = True, **more: Any) -> dict[str, Any]:
    call = prompts(dim, negative, prompt_embeds_mask=mask().bool(), **more)
    return call | {"negative_prompt_embeds_mask": mask(used=6).bool()} if negative else call


def flux2(pipeline: str) -> dict[str, Any]:
    pipe = images.flux2(pipeline)
    return {"transformer": pipe.transformer, "scheduler": pipe.scheduler}


def krea2() -> dict[str, Any]:
    from diffusers import Krea2Transformer2DModel

    transformer = Krea2Transformer2DModel(
        in_channels=16,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        timestep_embed_dim=32,
        text_hidden_dim=16,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=24,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    return {"transformer": transformer, "scheduler": flow(use_dynamic_shifting=True)}


def krea2_call(negative: bool = True) -> dict[str, Any]:
    call = masked(16, negative, height=32, width=32)
    for name in [name for name in call if name.endswith("prompt_embeds")]:
        call[name] = torch.stack([call[name], call[name].flip(-1)], dim=2)  # [B, tokens, layers, width]
    return call


def ideogram4() -> dict[str, Any]:
    from diffusers import Ideogram4Transformer2DModel

    def one() -> Any:
        return Ideogram4Transformer2DModel(
            in_channels=8,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            intermediate_size=48,
            adaln_dim=16,
            llm_features_dim=24,
            mrope_section=(4, 2, 2),
        )

    return {"transformer": one(), "unconditional_transformer": one(), "scheduler": flow()}


def ernie() -> dict[str, Any]:
    from diffusers import ErnieImageTransformer2DModel

    transformer = ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=3,
        ffn_hidden_size=48,
        in_channels=8,
        out_channels=8,
        text_in_dim=16,
        rope_axes_dim=(4, 6, 6),
    )
    return {"transformer": transformer, "scheduler": flow(shift=3.0)}


def anima() -> dict[str, Any]:
    from diffusers import AnimaTextConditioner, CosmosTransformer3DModel

    transformer = CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        mlp_ratio=2.0,
        text_embed_dim=16,
        adaln_lora_dim=4,
        max_size=(4, 16, 16),
        extra_pos_embed_type=None,
        concat_padding_mask=False,  # it is resized by torchvision, which need not be there
    )
    conditioner = AnimaTextConditioner(
        source_dim=16,
        target_dim=16,
        model_dim=16,
        num_layers=1,
        num_attention_heads=2,
        target_vocab_size=32,
        min_sequence_length=8,
    )
    return {"transformer": transformer, "text_conditioner": conditioner, "scheduler": flow(shift=3.0)}


def anima_call() -> dict[str, Any]:
    call: dict[str, Any] = {"height": 32, "width": 32}
    for seed, prefix in enumerate(("", "negative_")):
        call[f"{prefix}qwen_prompt_embeds"] = embeds(1, TOKENS, 16, seed=seed)
        call[f"{prefix}qwen_attention_mask"] = mask()
        call[f"{prefix}t5_input_ids"] = torch.arange(TOKENS)[None] + seed
        call[f"{prefix}t5_attention_mask"] = mask()
    return call


def qwen21() -> dict[str, Any]:
    from diffusers import QwenImage21Transformer2DModel

    transformer = QwenImage21Transformer2DModel(
        in_channels=8,
        out_channels=8,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    return {"transformer": transformer, "scheduler": flow(use_dynamic_shifting=True)}


def qwen21_call(negative: bool = True, **more: Any) -> dict[str, Any]:
    call = masked(16, negative, height=64, width=64, **more)
    for prefix in ("", "negative_") if negative else ("",):
        call[f"{prefix}image_pad_mask"] = torch.zeros(1, TOKENS, dtype=torch.bool)
    return call


def h3(*names: str) -> dict[str, Any]:
    from diffusers import MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel

    def one() -> Any:
        return MiniMaxH3Transformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            hidden_size=32,
            num_layers=3,
            num_refiner_layers=1,
            ffn_dim=48,
            in_channels=24,
            audio_in_channels=32,
            text_dim=16,
            freq_dim=32,
            time_embed_hidden_dim=32,
            time_embed_dim=16,
            rope_freq_dim=2,
        )

    parts = {name: one() for name in names}
    return parts | {"scheduler": MiniMaxH3Scheduler(12.0), "audio_scheduler": MiniMaxH3Scheduler(3.0)}


def h3_call() -> dict[str, Any]:
    noise = {"latents": embeds(1, 24, 37, 2, 2, seed=3), "audio_latents": embeds(2, 32, 207, seed=4)}
    tags = torch.ones(TOKENS, dtype=torch.long)
    return {"prompt_embeds": embeds(1, TOKENS, 16), "text_token_tags": tags, "height": 32, "width": 32} | noise


def music3() -> dict[str, Any]:
    from diffusers import MiniMaxMusic3ConditionEncoder, MiniMaxMusic3Transformer1DModel

    transformer = MiniMaxMusic3Transformer1DModel(
        in_channels=4,
        condition_dim=16,
        num_layers=3,
        num_attention_heads=2,
        attention_head_dim=8,
        ff_inner_dim=32,
        rotary_dim=4,
        fourier_embedding_dim=16,
    )
    encoder = MiniMaxMusic3ConditionEncoder(condition_hidden_dim=8, num_condition_layers=2, out_dim=16)
    return {"transformer": transformer, "condition_encoder": encoder, "scheduler": flow(num_train_timesteps=1)}


def helios(stages: int = 1, distilled: bool = False) -> dict[str, Any]:
    from diffusers import HeliosDMDScheduler, HeliosScheduler, HeliosTransformer3DModel

    transformer = HeliosTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=48,
        num_layers=3,
        rope_dim=(4, 6, 6),
    )
    kind = HeliosDMDScheduler if distilled else HeliosScheduler
    bounds = [stage / stages for stage in range(stages + 1)]
    return {"transformer": transformer, "scheduler": kind(stages=stages, stage_range=bounds, gamma=0.3)}


def pyramid_call(**more: Any) -> dict[str, Any]:
    call = prompts(16, height=128, width=128, num_latent_frames_per_chunk=2, num_frames=10, history_sizes=[4, 2, 1])
    return call | {"pyramid_num_inference_steps_list": [STEPS] * 3} | more


def ltx2() -> dict[str, Any]:
    pipe = videos.ltx2()
    return {name: getattr(pipe, name) for name in ("transformer", "scheduler", "vae", "audio_vae")}


def ltx2_call() -> dict[str, Any]:
    call: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 9, "batch_size": 1, "dtype": torch.float32}
    for seed, prefix in enumerate(("", "negative_")):
        call[f"{prefix}connector_prompt_embeds"] = embeds(1, TOKENS, 16, seed=seed)
        call[f"{prefix}connector_audio_prompt_embeds"] = embeds(1, TOKENS, 16, seed=seed + 2)
        call[f"{prefix}connector_attention_mask"] = mask()
    return call


def echo() -> dict[str, Any]:
    """LTX-2 with as many channels of sound as the pipeline assumes without an autoencoder for it."""
    made = ltx2()
    config = dict(made["transformer"].config) | {"audio_in_channels": 128, "audio_out_channels": 128}
    return {"transformer": type(made["transformer"]).from_config(config), "vae": made["vae"]}


def echo_call() -> dict[str, Any]:
    """Noise levels are given, as there is no scheduler."""
    text = {"connector_prompt_embeds": embeds(1, TOKENS, 16), "connector_attention_mask": mask()}
    text["connector_audio_prompt_embeds"] = embeds(1, TOKENS, 16, seed=1)
    return text | {"sigmas": [1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.0], "height": 32, "width": 32, "num_frames": 9}


def animate() -> dict[str, Any]:
    from diffusers import WanAnimate2Transformer3DModel

    transformer = WanAnimate2Transformer3DModel(
        text_len=TOKENS, dim=32, ffn_dim=48, freq_dim=32, text_dim=16, num_heads=2, num_layers=3
    )
    return {"transformer": transformer, "vae": videos.wan("WanPipeline").vae, "scheduler": flow(shift=3.0)}


def animate_call() -> dict[str, Any]:
    call: dict[str, Any] = {"prompt_embeds": [embeds(TOKENS, 16)], "prompt_ref_embeds": [embeds(TOKENS, 16, seed=2)]}
    call |= {"negative_prompt_embeds": [embeds(TOKENS, 16, seed=1)], "condition_clip_context": embeds(1, 257, 1280)}
    call |= {"denoiser_input_fields": {"encoder_hidden_states_image": embeds(1, 257, 1280, seed=3)}}
    call |= {"driving_video_pixels": embeds(1, 3, 9, 32, 32).tanh(), "reference_image_latents": embeds(20, 1, 4, 4)}
    return call | {"segment_frame_length": 5, "effective_segment": 4, "num_segments": 2, "height": 32, "width": 32}


def cosmos3() -> dict[str, Any]:
    from diffusers import Cosmos3OmniTransformer

    transformer = Cosmos3OmniTransformer(
        head_dim=16,
        hidden_size=32,
        intermediate_size=48,
        latent_channel=4,
        patch_latent_dim=16,
        num_attention_heads=2,
        num_hidden_layers=3,
        num_key_value_heads=1,
        vocab_size=64,
        rope_axes_dim=(4, 2, 2),
        sound_gen=True,
        sound_dim=4,
    ).float()
    return {"transformer": transformer, "scheduler": videos.wan("WanPipeline").scheduler}


def cosmos3_call(**more: Any) -> dict[str, Any]:
    ids = list(range(TOKENS))
    return {"cond_input_ids": ids, "uncond_input_ids": ids[::-1], "num_frames": 5, "height": 64, "width": 64} | more


def qwen() -> dict[str, Any]:
    return {"transformer": images.qwen("QwenImagePipeline").transformer, "scheduler": flow(use_dynamic_shifting=True)}


def qwen_call(**more: Any) -> dict[str, Any]:
    return masked(16, height=64, width=64, **more)


def picture(*layout: int) -> torch.Tensor:
    return embeds(1, *(layout or (4, 1)), 8, 8, seed=4)


def kontext() -> dict[str, Any]:
    return {"transformer": images.flux("FluxPipeline").transformer, "scheduler": flow(shift=3.0)}


def wan(experts: int, image_dim: int | None) -> dict[str, Any]:
    made = {"transformer": videos.wan_transformer(36, image_dim), "scheduler": videos.wan("WanPipeline").scheduler}
    return made | ({"transformer_2": videos.wan_transformer(36), "boundary_ratio": 0.8} if experts == 2 else {})


def vace() -> dict[str, Any]:
    from diffusers import WanVACETransformer3DModel

    def one() -> Any:
        config = dict(videos.wan_transformer().config) | {"vace_layers": [0, 2], "vace_in_channels": 96}
        return WanVACETransformer3DModel.from_config(config)

    return wan(1, None) | {"transformer": one(), "transformer_2": one(), "boundary_ratio": 0.8}


def wan_call(**more: Any) -> dict[str, Any]:
    return prompts(16, height=32, width=32, num_frames=5, **more)
