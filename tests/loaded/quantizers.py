"""Pipelines whose denoiser was quantized by somebody else, made on a CPU with the real libraries."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests import tiny

KEPT = ["proj_out", "x_embedder", "context_embedder", "time_text_embed", "norm_out"]


def with_transformer(make: Callable[[str], Any], pipe: Any | None = None) -> Any:
    """A tiny FLUX pipeline whose transformer was saved, and loaded again by `make` (given the folder)."""
    pipe = pipe or tiny.build("flux")
    with tempfile.TemporaryDirectory() as folder:
        pipe.transformer.save_pretrained(Path(folder, "transformer"))
        pipe.transformer = make(folder).eval()
    return pipe


# ---- GGUF ------------------------------------------------------------------------------------------


def write_gguf(model: torch.nn.Module, path: Path, left_out: tuple[str, ...] = (), form: str = "Q8_0") -> None:
    """Weights of the blocks in a form of GGUF, all else (and names with a part of `left_out`) as it is."""
    import gguf

    kind = gguf.GGMLQuantizationType[form]
    writer = gguf.GGUFWriter(path, "flux")
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        fits = values.ndim == 2 and "block" in name and not values.shape[-1] % 32
        if fits and not any(part in name for part in left_out):
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf(
    pipe: Any | None = None,
    left_out: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
    form: str = "Q8_0",
) -> Any:
    """Loaded by `from_single_file` from a GGUF file, to compute in `dtype` as the rest of the pipeline does."""
    import diffusers

    pipe = pipe or tiny.build("flux")

    def load(folder: str) -> Any:
        write_gguf(pipe.transformer, Path(folder, "model.gguf"), left_out, form)
        config = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
        return type(pipe.transformer).from_single_file(
            str(Path(folder, "model.gguf")),
            config=folder,
            subfolder="transformer",
            quantization_config=config,
            torch_dtype=dtype,
        )

    pipe = with_transformer(load, pipe)
    for _, module in tiny.component_modules(pipe):
        if dtype != torch.float32 and module is not pipe.transformer:
            module.to(dtype)
    return pipe


# ---- bitsandbytes ----------------------------------------------------------------------------------


def wide_flux() -> Any:
    """FLUX of width 64: bitsandbytes packs 4-bit weights for a CPU in rows of 64."""
    from diffusers import FluxTransformer2DModel

    pipe = tiny.build("flux")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        pipe.transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=32,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=True,
            axes_dims_rope=(8, 8, 16),
        ).eval()
    tiny.redraw_zeros(pipe.transformer, torch.Generator().manual_seed(3))
    return pipe


@contextlib.contextmanager
def bitsandbytes_on_a_cpu() -> Iterator[None]:
    """diffusers asks for a GPU before it loads; bitsandbytes itself needs none. All else is the real path."""
    from diffusers.quantizers.bitsandbytes import bnb_quantizer

    with contextlib.ExitStack() as stack:
        for kind in (bnb_quantizer.BnB8BitDiffusersQuantizer, bnb_quantizer.BnB4BitDiffusersQuantizer):
            stack.enter_context(mock.patch.object(kind, "validate_environment", lambda self, *a, **k: None))
            stack.enter_context(mock.patch.object(kind, "update_device_map", lambda self, found: {"": "cpu"}))
        yield


def bitsandbytes(bits: int) -> Any:
    """Loaded with a BitsAndBytesConfig."""
    import diffusers

    options: dict[str, Any] = {"load_in_8bit": True} if bits == 8 else {"load_in_4bit": True}
    options |= {"bnb_4bit_compute_dtype": torch.float32} if bits == 4 else {}
    config = diffusers.BitsAndBytesConfig(**options, llm_int8_skip_modules=KEPT)

    def load(folder: str) -> Any:
        with bitsandbytes_on_a_cpu():
            return diffusers.FluxTransformer2DModel.from_pretrained(
                folder, subfolder="transformer", quantization_config=config, torch_dtype=torch.float32
            )

    return with_transformer(load, wide_flux())


# ---- torchao ---------------------------------------------------------------------------------------


def torchao() -> Any:
    """Loaded with a TorchAoConfig."""
    import diffusers
    from torchao.quantization import Int8WeightOnlyConfig

    config = diffusers.TorchAoConfig(Int8WeightOnlyConfig(version=2))
    return with_transformer(
        lambda folder: diffusers.FluxTransformer2DModel.from_pretrained(
            folder, subfolder="transformer", quantization_config=config, torch_dtype=torch.float32
        )
    )


def torchao_by_hand(kind: str) -> Any:
    """`quantize_` on the live transformer."""
    from torchao import quantization

    pipe = tiny.build("flux")
    config = getattr(quantization, kind)(version=2)
    for blocks in (pipe.transformer.transformer_blocks, pipe.transformer.single_transformer_blocks):
        quantization.quantize_(blocks, config)
    return pipe


# ---- optimum-quanto --------------------------------------------------------------------------------


def quanto() -> Any:
    """Loaded with a QuantoConfig."""
    import diffusers

    config = diffusers.QuantoConfig(weights_dtype="int8")
    return with_transformer(
        lambda folder: diffusers.FluxTransformer2DModel.from_pretrained(
            folder, subfolder="transformer", quantization_config=config, torch_dtype=torch.float32
        )
    )


def quanto_by_hand(frozen: bool = True) -> Any:
    """`quantize` on the live transformer, and `freeze`."""
    from optimum import quanto

    pipe = tiny.build("flux")
    quanto.quantize(pipe.transformer, weights=quanto.qint8, exclude=KEPT)
    if frozen:
        quanto.freeze(pipe.transformer)
    return pipe


# ---- NVIDIA ModelOpt -------------------------------------------------------------------------------


def modelopt() -> Any:
    """`mtq.quantize` on the live transformer: fake quantization."""
    from modelopt.torch import quantization

    pipe = tiny.build("flux")
    quantization.quantize(
        pipe.transformer, quantization.INT8_DEFAULT_CFG, forward_loop=lambda model: tiny.run(pipe, "flux")
    )
    return pipe


# ---- nunchaku-lite ---------------------------------------------------------------------------------


class SVDQW4A4Linear(torch.nn.Module):
    """Tensors and names of nunchaku-lite's layer, whose kernels need a GPU; the product is torch's, from its codes."""

    def __init__(self, layer: torch.nn.Linear, rank: int = 4) -> None:
        super().__init__()
        weight = layer.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 7
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.qweight = torch.nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.wscales = torch.nn.Parameter(scale, requires_grad=False)
        self.smooth_factor = torch.nn.Parameter(torch.ones(layer.in_features), requires_grad=False)
        self.proj_down = torch.nn.Parameter(torch.zeros(layer.in_features, rank), requires_grad=False)
        self.proj_up = torch.nn.Parameter(torch.zeros(layer.out_features, rank), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        smooth = x / self.smooth_factor
        low = (smooth @ self.proj_down) @ self.proj_up.T
        return torch.nn.functional.linear(smooth, self.qweight.to(x.dtype) * self.wscales, self.bias) + low


def nunchaku_lite() -> Any:
    """The attention of the blocks in layers of nunchaku-lite's shape."""
    pipe = tiny.build("flux")
    for name, layer in list(pipe.transformer.named_modules()):
        if "block" in name and name.endswith(("attn.to_q", "attn.to_k", "attn.to_v")):
            pipe.transformer.set_submodule(name, SVDQW4A4Linear(layer))
    return pipe
