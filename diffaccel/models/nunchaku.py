"""Names that nunchaku's files use for the layers of a block, by family, as data.

Files of FLUX.1 have names of their own; later ones (Qwen-Image, Nunchaku Lite) use the paths of diffusers' modules,
with some projections fused (`FUSED`).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Name:
    """One 4-bit layer of a file: the diffusers layers whose rows it holds, and which part of their input it reads."""

    layers: tuple[str, ...]
    part: int = 0
    unsigned: bool = False  # int4 kernels read it without sign


@dataclass(frozen=True)
class BlockNames:
    """The names inside one kind of block: 4-bit layers, adaLN layers with their number of chunks, and plain ones."""

    quantized: dict[str, Name]
    adaln: dict[str, int] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)  # name in the file -> name in diffusers


@dataclass(frozen=True)
class FileNames:
    """A family's files."""

    model_class: str
    blocks: dict[str, BlockNames]  # by the attribute of the block list


_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")

NATIVE: dict[str, FileNames] = {
    "flux": FileNames(
        "NunchakuFluxTransformer2dModel",
        {
            "transformer_blocks": BlockNames(
                {
                    "qkv_proj": Name(_QKV),
                    "qkv_proj_context": Name(_ADDED),
                    "out_proj": Name(("attn.to_out.0",)),
                    "out_proj_context": Name(("attn.to_add_out",)),
                    "mlp_fc1": Name(("ff.net.0.proj",)),
                    "mlp_fc2": Name(("ff.net.2",), unsigned=True),
                    "mlp_context_fc1": Name(("ff_context.net.0.proj",)),
                    "mlp_context_fc2": Name(("ff_context.net.2",), unsigned=True),
                },
                {"norm1.linear": 6, "norm1_context.linear": 6},
                {
                    "norm_q.weight": "attn.norm_q.weight",
                    "norm_k.weight": "attn.norm_k.weight",
                    "norm_added_q.weight": "attn.norm_added_q.weight",
                    "norm_added_k.weight": "attn.norm_added_k.weight",
                },
            ),
            "single_transformer_blocks": BlockNames(
                {
                    "qkv_proj": Name(_QKV),
                    "out_proj": Name(("proj_out",)),
                    "mlp_fc1": Name(("proj_mlp",)),
                    "mlp_fc2": Name(("proj_out",), part=1, unsigned=True),
                },
                {"norm.linear": 3},
                {"norm_q.weight": "attn.norm_q.weight", "norm_k.weight": "attn.norm_k.weight"},
            ),
        },
    )
}

# Fused projections in files that otherwise use diffusers' paths: end of the path -> the layers' ends.
FUSED: dict[str, tuple[str, ...]] = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "add_qkv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_kv": ("to_k", "to_v"),
}
