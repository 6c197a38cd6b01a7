"""How large published denoisers are under our own choice of layers: counted on the meta device, nothing downloaded.

    python benchmarks/quantized_sizes.py        # prints JSON, writes benchmarks/results/quantized_sizes.json

"Half the bytes" is true of a layer. Of a model it depends on what stays in 16 bits: families that compute a modulation
(adaLN) from the conditioning in every block keep up to a third of their weights there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from diffaccel.models.registry import CARDS
from diffaccel.quantization.policy import select

RESULTS = Path(__file__).parent / "results" / "quantized_sizes.json"
RANK, GROUP = 32, 64  # of SVDQuant in INT4

# Name -> class, and what of its published config is not the class's default.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "FLUX.1-dev": ("FluxTransformer2DModel", {"guidance_embeds": True}),
    "Wan 14B": ("WanTransformer3DModel", {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}),
    "Qwen-Image": ("QwenImageTransformer2DModel", {}),
    "HunyuanVideo": ("HunyuanVideoTransformer3DModel", {}),
}


def sizes(model: nn.Module) -> dict[str, float]:
    """Bytes of `model`'s weights in bf16, in 8 bits (codes and a float32 scale per row) and as INT4 with a branch."""
    spec = next(card for card in CARDS.values() if type(model).__name__ in card.classes)
    plain = 2 * sum(p.numel() for p in model.parameters())
    eight = four = plain
    quantized = 0
    for name in select(model, spec).quantized:
        rows, columns = model.get_submodule(name).weight.shape
        quantized += rows * columns
        eight += -rows * columns + 4 * rows
        codes = rows * columns * (1 / 2 + 2 / GROUP)
        four += -2 * rows * columns + codes + 2 * (RANK * (rows + columns) + columns)
    return {
        "bf16_bytes": plain,
        "quantized_share": round(2 * quantized / plain, 3),
        "8_bit_bytes": eight,
        "8_bit_of_bf16": round(eight / plain, 3),
        "int4_rank_32_bytes": round(four),
        "int4_rank_32_of_bf16": round(four / plain, 3),
    }


def main() -> None:
    rows = {}
    for name, (cls, config) in MODELS.items():
        with torch.device("meta"):
            rows[name] = sizes(getattr(diffusers, cls)(**config))
    document = json.dumps(
        {"origin": "counted on the meta device", "diffusers": diffusers.__version__, "rows": rows}, indent=1
    )
    RESULTS.write_text(document + "\n")
    print(document)


if __name__ == "__main__":
    main()
