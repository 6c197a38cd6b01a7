"""LoRA files for the tiny pipelines, in the names of diffusers, of kohya's scripts and of the models' authors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

State = dict[str, torch.Tensor]
Targets = Mapping[str, tuple[str, ...]]  # the author's name of a layer -> the layers of diffusers, one below the other
CONVS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


class Random:
    """Matrices for a file, the same in every run."""

    def __init__(self, size: float = 0.3, seed: int = 0) -> None:
        self.size, self.generator = size, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator) * self.size

    def pair(self, layer: torch.nn.Module, rank: int, outputs: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(down, up) that fit a layer, or several with `outputs` rows together."""
        if isinstance(layer, CONVS):
            ones = (1,) * len(layer.kernel_size)
            down = self(rank, layer.in_channels, *layer.kernel_size)
            return down, self(layer.out_channels, rank, *ones)
        assert isinstance(layer, torch.nn.Linear)
        return self(rank, layer.in_features), self(outputs or layer.out_features, rank)


def layers(module: torch.nn.Module, pattern: str, kinds: tuple[type, ...] = (torch.nn.Linear, *CONVS)) -> list[str]:
    """Layers whose path the regular expression finds something in."""
    return [n for n, m in module.named_modules() if isinstance(m, kinds) and re.search(pattern, n)]


def peft(
    pipe: Any,
    pattern: str,
    *,
    component: str = "transformer",
    rank: int = 4,
    ranks: Callable[[str], int] | None = None,
    bias: bool = False,
    dora: bool = False,
    alpha: Callable[[int], float] | None = None,
    random: Random | None = None,
    size: float = 0.3,
) -> State:
    """peft's names, as diffusers saves them."""
    random, module, state = random or Random(size), getattr(pipe, component), {}
    for index, name in enumerate(layers(module, pattern)):
        layer, key = module.get_submodule(name), f"{component}.{name}"
        down, up = random.pair(layer, ranks(name) if ranks else rank)
        state[f"{key}.lora_A.weight"], state[f"{key}.lora_B.weight"] = down, up
        if bias:
            state[f"{key}.lora_B.bias"] = random(len(up))
        if dora:
            state[f"{key}.lora_magnitude_vector"] = magnitude(layer, random)
        if alpha:
            state[f"{key}.alpha"] = torch.tensor(alpha(index))
    assert state, pattern
    return state


def magnitude(layer: torch.nn.Module, random: Random) -> torch.Tensor:
    """About the rows' lengths, as training leaves them: [out], or [1, out, 1, ...] of a convolution."""
    assert isinstance(layer.weight, torch.Tensor)
    rows = layer.weight.detach().flatten(1).norm(dim=1)
    rows = rows * (1 + 0.5 * random(len(rows)))
    return rows.view(1, -1, *(1,) * (layer.weight.ndim - 2)) if layer.weight.ndim > 2 else rows


def kohya(
    pipe: Any,
    pattern: str,
    *,
    component: str = "unet",
    prefix: str = "lora_unet_",
    rank: int = 4,
    alpha: Callable[[int], float] | None = lambda index: 1.0,
    dora: bool = False,
    names: Callable[[str], str] = str,
    random: Random | None = None,
) -> State:
    """kohya's names: dots become underscores."""
    random, module, state = random or Random(), getattr(pipe, component), {}
    for index, name in enumerate(layers(module, pattern)):
        layer, key = module.get_submodule(name), prefix + names(name).replace(".", "_")
        state[f"{key}.lora_down.weight"], state[f"{key}.lora_up.weight"] = random.pair(layer, rank)
        if alpha:
            state[f"{key}.alpha"] = torch.tensor(alpha(index))
        if dora:
            rows = magnitude(layer, random).flatten()
            state[f"{key}.dora_scale"] = rows.view(-1, *(1,) * (layer.weight.ndim - 1))  # type: ignore[union-attr]
    assert state, pattern
    return state


def authored(
    pipe: Any,
    targets: Targets,
    *,
    form: str = "diffusion_model.{}",
    ends: tuple[str, str] = ("lora_A", "lora_B"),
    rank: int = 4,
    alpha: Callable[[int], float] | None = None,
    bias: str = "",
    dora: bool = False,
    random: Random | None = None,
) -> State:
    """The authors' names: `form` around each, "_" in it for kohya's way with dots. `bias`: the end of bias keys."""
    random, state = random or Random(), {}
    for index, (name, owners) in enumerate(targets.items()):
        held = [pipe.transformer.get_submodule(owner) for owner in owners]
        outputs = sum(layer.out_features for layer in held)
        key = form.format(name.replace(".", "_") if form.endswith("_{}") else name)
        down, up = random.pair(held[0], rank, outputs)
        state[f"{key}.{ends[0]}.weight"], state[f"{key}.{ends[1]}.weight"] = down, up
        if alpha:
            state[f"{key}.alpha"] = torch.tensor(alpha(index))
        if bias:
            state[f"{key}{bias}"] = random(outputs)
        if dora:
            state[f"{key}.dora_scale"] = torch.cat([magnitude(layer, random) for layer in held])[:, None]
    return state


def _qkv(owner: str, *projections: str) -> tuple[str, ...]:
    return tuple(f"{owner}.{projection}" for projection in projections)


def _per_block(count: int, table: Mapping[str, Iterable[str] | str]) -> Targets:
    made = {}
    for index in range(count):
        for name, owners in table.items():
            held = (owners,) if isinstance(owners, str) else tuple(owners)
            made[name.format(index)] = tuple(owner.format(index) for owner in held)
    return made


_DOUBLE = "transformer_blocks.{}"
_SINGLE = "single_transformer_blocks.{}"
FLUX = _per_block(
    2,
    {
        "double_blocks.{}.img_attn.qkv": _qkv(f"{_DOUBLE}.attn", "to_q", "to_k", "to_v"),
        "double_blocks.{}.txt_attn.qkv": _qkv(f"{_DOUBLE}.attn", "add_q_proj", "add_k_proj", "add_v_proj"),
        "double_blocks.{}.img_attn.proj": f"{_DOUBLE}.attn.to_out.0",
        "double_blocks.{}.img_mlp.0": f"{_DOUBLE}.ff.net.0.proj",
        "double_blocks.{}.txt_mlp.2": f"{_DOUBLE}.ff_context.net.2",
        "single_blocks.{}.linear2": f"{_SINGLE}.proj_out",  # (linear1 is split by the sizes of the real model)
    },
)
XLABS = _per_block(
    2,
    {
        "double_blocks.{}.processor.qkv_lora1": _qkv(f"{_DOUBLE}.attn", "to_q", "to_k", "to_v"),
        "double_blocks.{}.processor.qkv_lora2": _qkv(f"{_DOUBLE}.attn", "add_q_proj", "add_k_proj", "add_v_proj"),
        "double_blocks.{}.processor.proj_lora1": f"{_DOUBLE}.attn.to_out.0",
        "single_blocks.{}.processor.proj_lora": f"{_SINGLE}.proj_out",
        "single_blocks.{}.processor.qkv_lora": _qkv(f"{_SINGLE}.attn", "to_q", "to_k", "to_v"),
    },
)
FLUX2 = _per_block(
    2,
    {
        "double_blocks.{}.img_attn.qkv": _qkv(f"{_DOUBLE}.attn", "to_q", "to_k", "to_v"),
        "double_blocks.{}.txt_attn.proj": f"{_DOUBLE}.attn.to_add_out",
        "double_blocks.{}.img_mlp.0": f"{_DOUBLE}.ff.linear_in",
        "single_blocks.{}.linear1": f"{_SINGLE}.attn.to_qkv_mlp_proj",
        "single_blocks.{}.linear2": f"{_SINGLE}.attn.to_out",
    },
)
HUNYUAN = _per_block(
    2,
    {
        "double_blocks.{}.img_attn_qkv": _qkv(f"{_DOUBLE}.attn", "to_q", "to_k", "to_v"),
        "double_blocks.{}.txt_attn_proj": f"{_DOUBLE}.attn.to_add_out",
        "double_blocks.{}.img_mlp.fc1": f"{_DOUBLE}.ff.net.0.proj",
        "single_blocks.{}.linear2": f"{_SINGLE}.proj_out",
    },
)
LTX2 = _per_block(
    2,
    {
        "transformer_blocks.{}.attn1.to_q": f"{_DOUBLE}.attn1.to_q",
        "transformer_blocks.{}.audio_ff.net.2": f"{_DOUBLE}.audio_ff.net.2",
    },
) | {"patchify_proj": ("proj_in",), "adaln_single.linear": ("time_embed.linear",)}
WAN = _per_block(
    3,
    {
        f"blocks.{{}}.self_attn.{a}": f"blocks.{{}}.attn1.{b}"
        for a, b in zip("qkvo", ("to_q", "to_k", "to_v", "to_out.0"), strict=True)
    }
    | {
        f"blocks.{{}}.cross_attn.{a}": f"blocks.{{}}.attn2.{b}"
        for a, b in zip("qkvo", ("to_q", "to_k", "to_v", "to_out.0"), strict=True)
    }
    | {"blocks.{}.ffn.0": "blocks.{}.ffn.net.0.proj", "blocks.{}.ffn.2": "blocks.{}.ffn.net.2"},
)
WAN_REST = {
    "time_embedding.0": ("condition_embedder.time_embedder.linear_1",),
    "time_projection.1": ("condition_embedder.time_proj",),
    "head.head": ("proj_out",),
}
Z_IMAGE = {
    name: (name,)
    for index in range(2)
    for name in (
        f"layers.{index}.attention.to_q",
        f"layers.{index}.attention.to_out.0",
        f"layers.{index}.feed_forward.w2",
    )
}


def same_names(pipe: Any, pattern: str) -> Targets:
    """Layers under diffusers' own names."""
    return {name: (name,) for name in layers(pipe.transformer, pattern, (torch.nn.Linear,))}


def lokr(pipe: Any, targets: Targets, whole: bool, alpha: float | None = None, form: str = "transformer.{}") -> State:
    """Kronecker factors; `whole`: the second one is not a product."""
    random, state = Random(0.5), {}
    for name, (owner,) in targets.items():
        layer, key = pipe.transformer.get_submodule(owner), form.format(name)
        state[f"{key}.lokr_w1"] = random(4, 4)
        shape = layer.out_features // 4, layer.in_features // 4
        if whole:
            state[f"{key}.lokr_w2"] = random(*shape)
        else:
            state[f"{key}.lokr_w2_a"], state[f"{key}.lokr_w2_b"] = random(shape[0], 2), random(2, shape[1])
        if alpha is not None:
            state[f"{key}.alpha"] = torch.tensor(alpha)
    return state


_RESNET = {"conv1": "in_layers.2", "conv2": "out_layers.3", "time_emb_proj": "emb_layers.1"}


_OUTSIDE = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}


def authors_unet_name(name: str) -> str:
    """`down_blocks.0.attentions.1...` -> `input_blocks.2.1...`, and so on, of a U-Net with one layer per block."""
    found = re.match(r"(down|up|mid)_blocks?\.(?:(\d+)\.)?(resnets|attentions)\.(\d+)\.(.*)", name)
    if found is None:
        return _OUTSIDE[name]
    side, block, kind, layer = found[1], int(found[2] or 0), found[3], int(found[4])
    rest = _RESNET.get(found[5], found[5])
    if side == "mid":
        return f"middle_block.{1 if kind == 'attentions' else 2 * layer}.{rest}"
    inner = 0 if kind == "resnets" else 1
    return (
        f"input_blocks.{1 + 2 * block + layer}.{inner}.{rest}"
        if side == "down"
        else f"output_blocks.{2 * block + layer}.{inner}.{rest}"
    )
