"""Tiny random-weight REAL diffusers pipelines.

Nothing is downloaded. `build` is deterministic in (family, seed), leaves the global random state alone, and
re-draws every parameter that is initialised to zero, so that each block matters. `call_kwargs` gives a
deterministic call.
"""

from __future__ import annotations

import string
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

FAMILIES = ("flux", "wan", "sd3", "sdxl")
EXTRAS = ("flux_img2img", "wan22", "wan_v2v")
TRANSFORMERS = ("flux", "wan", "sd3")  # families with transformer blocks
SEQUENTIAL_CFG = ("flux", "wan")  # families that call the denoiser once per branch
PROMPTS = ("red ring", "blue square", "tiny green star", "white disc")
STEPS = 6
TEXT_TOKENS = 16

# ----------------------------------------------------------------------------------------------------
# Tokenizers: one token per character, so that any printable prompt works.


def clip_tokenizer() -> Any:
    """A byte-level CLIP tokenizer without merges."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    pieces = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(symbol + "</w>" for symbol in alphabet)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=TEXT_TOKENS)


def t5_tokenizer() -> Any:
    """A unigram T5 tokenizer with one piece per printable character."""
    from transformers import T5Tokenizer

    letters = [c for c in string.printable if not c.isspace()]
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5Tokenizer(vocab=[*specials, *((c, -3.0) for c in letters)], extra_ids=0, model_max_length=TEXT_TOKENS)


# ----------------------------------------------------------------------------------------------------
# Components.


def _clip(projection: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=600,
        hidden_size=32,
        intermediate_size=37,
        projection_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=TEXT_TOKENS,
        hidden_act="gelu",
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config)


def _t5(width: int, multilingual: bool = False) -> Any:
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "d_model": width,
        "d_kv": 8,
        "d_ff": 37,
        "num_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "feed_forward_proj": "gated-gelu",
    }
    return UMT5EncoderModel(UMT5Config(**sizes)) if multilingual else T5EncoderModel(T5Config(**sizes))


def _kl(latent_channels: int, blocks: int, *, shift: bool) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(8,) * blocks,
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        sample_size=16,
        use_quant_conv=not shift,
        use_post_quant_conv=not shift,
        shift_factor=0.06 if shift else None,
        scaling_factor=1.5 if shift else 0.13,
    )


def _flux_components() -> dict[str, Any]:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    return {
        "transformer": FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=True,
            axes_dims_rope=(4, 4, 8),
        ),
        "text_encoder": _clip(projection=False),
        "text_encoder_2": _t5(32),
        "tokenizer": clip_tokenizer(),
        "tokenizer_2": t5_tokenizer(),
        "vae": _kl(4, 1, shift=True),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def _flux() -> Any:
    from diffusers import FluxPipeline

    return FluxPipeline(**_flux_components())


def _flux_img2img() -> Any:
    from diffusers import FluxImg2ImgPipeline

    return FluxImg2ImgPipeline(**_flux_components())


def _wan_transformer() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=48,
        num_layers=3,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )


def _wan(experts: int = 1) -> Any:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

    vae = AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    second = {"transformer_2": _wan_transformer(), "boundary_ratio": 0.875} if experts == 2 else {}
    return WanPipeline(
        transformer=_wan_transformer(),
        text_encoder=_t5(32, multilingual=True),
        tokenizer=t5_tokenizer(),
        vae=vae,
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        ),
        **second,
    )


def _wan_v2v() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, WanVideoToVideoPipeline

    parts = _wan().components
    parts = {name: parts[name] for name in ("tokenizer", "text_encoder", "transformer", "vae")}
    return WanVideoToVideoPipeline(**parts, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))


def _sd3() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=64,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        pos_embed_max_size=16,
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        text_encoder=_clip(projection=True),
        text_encoder_2=_clip(projection=True),
        text_encoder_3=_t5(64),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        tokenizer_3=t5_tokenizer(),
        vae=_kl(4, 1, shift=True),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def _sdxl() -> Any:
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        norm_num_groups=8,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80,  # 6 * 8 + 32
        cross_attention_dim=64,
    )
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        timestep_spacing="leading",
        steps_offset=1,
    )
    return StableDiffusionXLPipeline(
        unet=unet,
        text_encoder=_clip(projection=False),
        text_encoder_2=_clip(projection=True),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        vae=_kl(4, 2, shift=False),
        scheduler=scheduler,
        add_watermarker=False,
    )


_BUILDERS: dict[str, Callable[[], Any]] = {
    "flux": _flux,
    "flux_img2img": _flux_img2img,
    "sd3": _sd3,
    "sdxl": _sdxl,
    "wan": _wan,
    "wan22": lambda: _wan(experts=2),
    "wan_v2v": _wan_v2v,
}


def component_modules(pipe: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The pipeline's components that are modules, by name."""
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            yield name, component


def redraw_zeros(module: torch.nn.Module, generator: torch.Generator, std: float = 0.05) -> None:
    """Give every all-zero parameter small normal values."""
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def build(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny pipeline of `family` in eval mode, progress bar off; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + seed)
        pipe = _BUILDERS[family]()
    generator = torch.Generator().manual_seed(2000 + seed)
    for _, module in component_modules(pipe):
        redraw_zeros(module, generator)
        module.eval()
    if dtype != torch.float32:
        pipe.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call_kwargs(family: str, *, true_cfg: bool = False, seed: int = 0, **overrides: Any) -> dict[str, Any]:
    """All arguments of one deterministic call, fresh generator; guidance is on (flux: with true_cfg)."""
    kwargs: dict[str, Any] = {
        "prompt": PROMPTS[0],
        "num_inference_steps": STEPS,
        "generator": torch.Generator().manual_seed(seed),
        "output_type": "pt",
    }
    if family in ("flux", "flux_img2img"):
        kwargs |= {"height": 8, "width": 8, "guidance_scale": 3.5, "max_sequence_length": TEXT_TOKENS}
        if true_cfg:
            kwargs |= {"negative_prompt": "grey", "true_cfg_scale": 3.0}
        if family == "flux_img2img":
            image = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(77))
            kwargs |= {"image": image, "strength": 0.7}
    elif family in ("wan", "wan22", "wan_v2v"):
        kwargs |= {"height": 32, "width": 32, "guidance_scale": 4.0}
        kwargs |= {"negative_prompt": "grey", "max_sequence_length": TEXT_TOKENS}
        if family == "wan_v2v":
            frames = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(78))
            kwargs |= {"video": list(frames), "strength": 0.8}
        else:
            kwargs |= {"num_frames": 5}
    elif family == "sd3":
        kwargs |= {"height": 8, "width": 8, "guidance_scale": 4.0, "negative_prompt": "grey"}
        kwargs |= {"max_sequence_length": TEXT_TOKENS}
    elif family == "sdxl":
        kwargs |= {"height": 16, "width": 16, "guidance_scale": 4.0, "negative_prompt": "grey"}
    else:
        raise KeyError(family)
    kwargs |= overrides
    if family == "wan_v2v":  # its text cleaning needs ftfy, which is not installed
        kwargs["prompt_embeds"] = made_up_embeds(kwargs.pop("prompt"))
        kwargs["negative_prompt_embeds"] = made_up_embeds(kwargs.pop("negative_prompt"))
    return kwargs


def made_up_embeds(prompt: str) -> torch.Tensor:
    """Text embeddings that depend on the prompt, without a text encoder."""
    generator = torch.Generator().manual_seed(zlib.crc32(prompt.encode()))
    return torch.randn(1, TEXT_TOKENS, 32, generator=generator)


def no_guidance(family: str) -> dict[str, Any]:
    """The overrides that switch classifier-free guidance off."""
    return {} if family in ("flux", "flux_img2img") else {"guidance_scale": 1.0}


def output(result: Any) -> torch.Tensor:
    """The images or frames of a pipeline result, as one tensor."""
    value = result
    for name in ("images", "frames"):
        value = getattr(value, name, value)
    if isinstance(value, tuple):
        value = value[0]
    if isinstance(value, list):
        value = torch.stack([torch.as_tensor(item) for item in value])
    return torch.as_tensor(value)


def run(pipe: Any, family: str, **overrides: Any) -> torch.Tensor:
    """One deterministic call; its output tensor."""
    return output(pipe(**call_kwargs(family, **overrides)))


def denoiser(pipe: Any) -> torch.nn.Module:
    """The (first) denoiser of a pipeline."""
    module: torch.nn.Module = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    return module


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The transformer blocks of a denoiser in the order in which they run; empty for a U-Net."""
    names = ("transformer_blocks", "single_transformer_blocks", "blocks")
    return [block for name in names for block in getattr(model, name, ())]
