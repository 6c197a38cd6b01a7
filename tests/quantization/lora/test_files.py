"""LoRA files in every layout: equal to diffusers' own loader on the same file, and off again bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import attach, restore
from tests import fingerprint

from . import layouts
from .layouts import (
    FLUX,
    FLUX2,
    HUNYUAN,
    LTX2,
    WAN,
    WAN_REST,
    XLABS,
    Z_IMAGE,
    Random,
    authored,
    kohya,
    lokr,
    peft,
    same_names,
)
from .pipes import build, copied, distance, fused, run

Make = Callable[[Any], layouts.State]
DOWN_UP = ("lora_down", "lora_up")


@dataclass(frozen=True)
class Row:
    """One file. `make` gives its state dict for a pipeline, `metadata` what its header says. `fuses`: can diffusers
    add it to the weights?"""

    family: str
    layout: str
    make: Make
    metadata: dict[str, Any] | None = None
    fuses: bool = True


BLOCKS = {  # family -> layers that a LoRA of it touches
    "chroma": r"blocks\.\d+\.(attn\.to_[qv]|ff\.net|proj_)",
    "cogvideox": r"blocks\.\d+\.(attn1\.to_|ff\.net)",
    "flux": r"blocks\.\d+\.(attn\.to_[qv]|attn\.add_k|ff\.net|proj_)|x_embedder",
    "flux2": r"blocks\.\d+\.(attn\.to_|ff\.linear)|single_stream_modulation",
    "flux2_klein": r"blocks\.\d+\.(attn\.to_|ff\.linear)",
    "flux_fill": r"blocks\.\d+\.(attn\.to_[qv]|ff\.net)|x_embedder",
    "hunyuan_video": r"blocks\.\d+\.(attn\.to_|ff\.net|proj_)|norm_out\.linear",
    "hunyuan_video15": r"blocks\.\d+\.(attn\.to_|ff\.net)",
    "ltx": r"blocks\.\d+\.(attn\d\.to_|ff\.net)|time_embed\.linear",
    "ltx2": r"blocks\.\d+\.(attn\d\.to_|audio_ff\.net)",
    "mochi": r"blocks\.\d+\.(attn1\.(to|add)_|ff\.net)",
    "qwen": r"blocks\.\d+\.(attn\.to_|img_mlp\.net)|^img_in|norm_out",
    "sana": r"blocks\.\d+\.attn\d\.to_|conv_(inverted|point)|proj_out",
    "sd3": r"blocks\.\d+\.(attn\.to_[qv]|ff\.net)|pos_embed\.proj",
    "wan": r"blocks\.\d+\.(attn[12]\.to_|ffn\.net)|patch_embedding",
    "wan_i2v": r"blocks\.\d+\.(attn2\.|ffn\.net)|image_embedder",
    "z_image": r"layers\.\d+\.(attention\.to_|feed_forward|adaLN)",
}
UNET = r"attn[12]\.to_|ff\.net|proj_in|proj_out"
CONVS = r"resnets\.\d+\.conv[12]|downsamplers|conv_(in|out|shortcut)|time_emb_proj"


def uneven(index: int) -> float:
    """Alphas of which none is usual."""
    return (1.0, 6.0, 2.5)[index % 3]


def text_encoder(*components: str, **more: Any) -> Make:
    """peft's names on text encoders."""

    def make(pipe: Any) -> layouts.State:
        parts = [
            peft(pipe, r"_proj$|fc[12]", component=name, random=Random(0.3, i), **more)
            for i, name in enumerate(components)
        ]
        return {key: value for part in parts for key, value in part.items()}

    return make


def both(*makes: Make) -> Make:
    """Several parts in one file."""
    return lambda pipe: {key: value for make in makes for key, value in make(pipe).items()}


def wan_diff_b(pipe: Any) -> layouts.State:
    """As lightx2v's files for few steps: biases beside the pairs, and differences of norms that are zero."""
    state = authored(pipe, {**WAN, **WAN_REST}, ends=DOWN_UP, alpha=None, bias=".diff_b")
    return state | {
        "diffusion_model.blocks.0.norm3.diff": torch.zeros(4),
        "diffusion_model.blocks.0.norm3.diff_b": torch.zeros(4),
    }


def metadata(component: str = "transformer", rank: int = 4, **entries: Any) -> dict[str, Any]:
    """What a header says about one component."""
    config = {"r": rank, "lora_alpha": rank, "target_modules": ["to_q"], **entries}
    return {f"{component}.{key}": value for key, value in config.items()}


def part(name: str, **more: Any) -> Make:
    """peft's names on the layers of `BLOCKS`."""
    return lambda pipe: peft(pipe, BLOCKS[name], **more)


def mixed(name: str) -> int:
    """Ranks that differ."""
    return 2 if name.endswith("to_q") else 7 if "net" in name else 4


TEXT = {"component": "text_encoder", "prefix": "lora_te1_", "names": "text_model.{}".format}
TEXT_2 = {"component": "text_encoder_2", "prefix": "lora_te2_"}
CLIP = r"_proj$|fc[12]"
ROWS = [
    *(Row(name, "peft", part(name)) for name in BLOCKS if name != "flux_fill"),
    *(Row(name, "peft, ranks", part(name, ranks=mixed)) for name in ("flux", "wan", "sana")),
    *(Row(name, "peft, biases", part(name, bias=True)) for name in ("flux", "ltx", "qwen", "hunyuan_video")),
    *(
        Row(name, "peft, DoRA", part(name, dora=True))
        for name in ("flux", "wan", "sd3", "z_image", "cogvideox", "mochi")
    ),
    *(
        Row(name, f"peft, {said}", part(name), metadata(**entries))
        for name in ("flux", "wan", "ltx2")
        for said, entries in {
            "lora_alpha": {"lora_alpha": 2.5},
            "rsLoRA": {"lora_alpha": 3, "use_rslora": True},
            "patterns": {"lora_alpha": 2, "alpha_pattern": {r"^.*blocks\.[01]\..*to_q": 9, "to_out.0": 1, "q": 100}},
        }.items()
    ),
    Row(
        "flux",
        "peft, rank_pattern",
        part("flux", ranks=mixed),
        metadata(
            lora_alpha=3,
            use_rslora=True,
            rank=4,
            rank_pattern={"to_q": 2, r"(ff|ffn).*net\.\d.*": 7},
            alpha_pattern={r".*\.to_q": 8},
        ),
    ),
    Row("flux", "peft, .alpha", part("flux", alpha=lambda index: 1.5)),
    Row("flux", "peft, .alpha of each layer", part("flux", alpha=uneven)),
    Row("flux", "text encoder", both(part("flux"), text_encoder("text_encoder"))),
    Row(
        "flux",
        "text encoder, lora_alpha",
        text_encoder("text_encoder"),
        metadata(
            "text_encoder", lora_alpha=1, target_modules=["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
        ),
    ),
    Row("flux", "kohya", lambda pipe: authored(pipe, FLUX, form="lora_unet_{}", ends=DOWN_UP, alpha=uneven)),
    Row(
        "flux",
        "kohya, text encoder",
        lambda pipe: both(
            lambda p: authored(p, FLUX, form="lora_unet_{}", ends=DOWN_UP, alpha=uneven),
            lambda p: kohya(p, CLIP, **{**TEXT, "alpha": uneven}),
        )(pipe),
    ),
    Row("flux", "ComfyUI", lambda pipe: authored(pipe, FLUX, ends=DOWN_UP, alpha=uneven)),
    Row("flux", "xlabs", lambda pipe: authored(pipe, XLABS, form="{}", ends=("down", "up"))),
    Row(
        "flux_fill",
        "peft, narrower input",
        lambda pipe: peft(pipe, BLOCKS["flux_fill"]) | {"transformer.x_embedder.lora_A.weight": Random()(4, 16)},
    ),
    Row(
        "chroma",
        "kohya",
        lambda pipe: authored(
            pipe,
            {k: v for k, v in FLUX.items() if "img_mlp" not in k},
            form="lora_unet_{}",
            ends=DOWN_UP,
            alpha=uneven,
        ),
    ),
    Row("flux2", "authors", lambda pipe: authored(pipe, FLUX2)),
    Row("flux2", "kohya", lambda pipe: authored(pipe, FLUX2, form="lora_unet_{}", ends=DOWN_UP, alpha=uneven)),
    *(
        Row(
            "flux2",
            f"LoKr, whole={whole}",
            lambda pipe, whole=whole: lokr(pipe, same_names(pipe, r"blocks\.0\.(attn\.to_q|ff)"), whole),
        )
        for whole in (False, True)
    ),
    Row(
        "flux2",
        "LoKr of ai-toolkit",
        lambda pipe: lokr(pipe, {k: v for k, v in FLUX2.items() if len(v) == 1}, False, 1.0, "diffusion_model.{}"),
    ),
    *(
        Row(
            "z_image",
            f"LoKr of ai-toolkit, whole={whole}",
            lambda pipe, whole=whole: lokr(
                pipe, same_names(pipe, r"layers\.0\.attention\.to_[qk]"), whole, 1.0, "diffusion_model.{}"
            ),
        )
        for whole in (False, True)
    ),
    *(
        Row(
            "sdxl",
            f"peft, {said}",
            functools.partial(
                lambda pipe, pattern, more: peft(pipe, pattern, component="unet", **more), pattern=pattern, more=more
            ),
        )
        for said, pattern, more in (
            ("", UNET, {}),
            ("convolutions", CONVS, {}),
            ("DoRA", UNET, {"dora": True}),
            ("DoRA of convolutions", CONVS, {"dora": True}),
            ("biases", "conv_in|ff", {"bias": True}),
        )
    ),
    Row("sdxl", "peft, text encoders", text_encoder("text_encoder", "text_encoder_2")),
    Row("sdxl", "kohya", lambda pipe: kohya(pipe, UNET)),
    Row("sdxl", "kohya, convolutions", lambda pipe: kohya(pipe, r"resnets\.\d+\.conv[12]|downsamplers|time_emb_proj")),
    Row("sdxl", "kohya, without alphas", lambda pipe: kohya(pipe, UNET, alpha=None)),
    Row(
        "sdxl",
        "kohya, text encoders",
        lambda pipe: both(
            lambda p: kohya(p, UNET), lambda p: kohya(p, CLIP, **TEXT), lambda p: kohya(p, CLIP, **TEXT_2)
        )(pipe),
    ),
    Row(
        "sdxl",
        "authors' blocks",
        lambda pipe: kohya(pipe, r"^(down|mid|up).*(attn[12]\.to_|ff\.net|conv[12])", names=layouts.authors_unet_name),
    ),
    Row(
        "sdxl",
        "authors' other layers",
        lambda pipe: kohya(pipe, r"^(conv_|time_emb|add_emb)|^mid.*attn1", names=layouts.authors_unet_name),
    ),
    Row(
        "sd15",
        "kohya",
        lambda pipe: both(lambda p: kohya(p, UNET), lambda p: kohya(p, CLIP, **{**TEXT, "prefix": "lora_te_"}))(pipe),
    ),
    Row("sd15", "peft", lambda pipe: peft(pipe, UNET, component="unet")),
    Row("sd3", "text encoders", text_encoder("text_encoder", "text_encoder_2")),
    Row("wan", "authors", lambda pipe: authored(pipe, {**WAN, **WAN_REST})),
    Row("wan", "authors, alphas", lambda pipe: authored(pipe, WAN, ends=DOWN_UP, alpha=uneven)),
    Row("wan", "lightx2v", wan_diff_b),
    Row("wan", "musubi", lambda pipe: authored(pipe, WAN, form="lora_unet_{}", ends=DOWN_UP, alpha=uneven)),
    Row("wan_i2v", "of text to video", lambda pipe: authored(pipe, WAN)),
    Row(
        "wan22",
        "peft, both experts",
        both(
            lambda p: peft(p, BLOCKS["wan"]),
            lambda p: peft(p, BLOCKS["wan"], component="transformer_2", random=Random(0.3, 3)),
        ),
    ),
    Row("ltx", "authors", lambda pipe: authored(pipe, same_names(pipe, BLOCKS["ltx"]))),
    Row("ltx2", "authors", lambda pipe: authored(pipe, LTX2)),
    Row("hunyuan_video", "authors", lambda pipe: authored(pipe, HUNYUAN, form="{}")),
    Row("hunyuan_video", "ComfyUI", lambda pipe: authored(pipe, HUNYUAN)),
    Row(
        "qwen",
        "kohya",
        lambda pipe: authored(
            pipe,
            same_names(pipe, r"blocks\.\d+\.(attn\.to_|img_mlp)"),
            form="lora_unet_{}",
            ends=DOWN_UP,
            alpha=uneven,
        ),
    ),
    Row(
        "qwen",
        "ComfyUI, alphas",
        lambda pipe: authored(pipe, same_names(pipe, r"blocks\.\d+\.(attn\.to_|img_mlp)"), alpha=uneven),
    ),
    Row(
        "qwen",
        "default",
        lambda pipe: authored(
            pipe, same_names(pipe, r"blocks\.\d+\.attn\.to_"), form="{}", ends=("lora_A.default", "lora_B.default")
        ),
    ),
    Row("z_image", "kohya", lambda pipe: authored(pipe, Z_IMAGE, form="lora_unet_{}", ends=DOWN_UP, alpha=uneven)),
    Row("z_image", "ComfyUI, alphas", lambda pipe: authored(pipe, Z_IMAGE, alpha=uneven)),
]


def saved(row: Row, state: layouts.State, folder: Path) -> Any:
    """The file where a row has metadata, else a state dict that neither side can change for the other."""
    if row.metadata is None:
        return copied(state)
    import json

    from safetensors.torch import save_file

    path = folder / "lora.safetensors"
    save_file(
        {k: v.contiguous() for k, v in state.items()},
        path,
        {"format": "pt", "lora_adapter_metadata": json.dumps(row.metadata)},
    )
    return str(path)


def loaded_by_diffusers(row: Row, state: layouts.State, folder: Path) -> Any:
    """The truth: a pipeline with the file at strength 0.8."""
    pipe, source = build(row.family), saved(row, state, folder)
    if row.family == "wan22":  # it takes one expert's keys at a time, under the first one's name
        second = {k.replace("_2.", ".", 1): v for k, v in source.items() if k.startswith("transformer_2.")}
        pipe.load_lora_weights(second, adapter_name="a", load_into_transformer_2=True)
    if row.family == "hunyuan_video15":
        pipe.transformer.load_lora_adapter(source, adapter_name="a")
        pipe.transformer.set_adapters("a", 0.8)
        return pipe
    pipe.load_lora_weights(source, adapter_name="a")
    pipe.set_adapters("a", 0.8)
    return pipe


# A feature tried on one family goes the same way on these; they are run by `make test-all`.
AGAIN = {
    *((family, f"peft, {said}") for family in ("wan", "ltx2") for said in ("lora_alpha", "rsLoRA", "patterns")),
    *((family, "peft, DoRA") for family in ("cogvideox", "mochi", "z_image")),
    *((family, "peft, biases") for family in ("ltx", "qwen")),
    ("wan", "peft, ranks"),
    ("sd15", "peft"),
    ("sdxl", "kohya, without alphas"),
    ("sdxl", "kohya"),
}
TABLE = [
    pytest.param(
        row,
        id=f"{row.family}: {row.layout}",
        marks=[pytest.mark.slow] if (row.family, row.layout) in AGAIN else [],
    )
    for row in ROWS
]


@pytest.mark.parametrize("row", TABLE)
def test_equals_diffusers_own_loader(row: Row, tmp_path: Path) -> None:
    pipe = build(row.family)
    plain, state = run(pipe, row.family), row.make(pipe)
    before = fingerprint.snapshot_pipe(pipe)
    other = loaded_by_diffusers(row, state, tmp_path)
    wanted = run(other, row.family)
    loras = attach(pipe).acceleration.loras
    loras.load(saved(row, state, tmp_path), "a", 0.8)
    assert distance(run(pipe, row.family), wanted) <= 1e-6
    assert distance(plain, wanted) > 1e-3
    loras.set({"a": 0.7})
    assert distance(run(pipe, row.family), wanted) > 1e-4, "the output does not depend on the strength: no control"
    loras.unload()
    loras.load(saved(row, state, tmp_path), "a", 0.8, merge=True)
    assert distance(run(pipe, row.family), fused(other, row.family) if row.fuses else wanted) <= 1e-6
    restore(pipe)
    assert torch.equal(run(pipe, row.family), plain)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
