"""LoRA files in every layout: equal to diffusers' own loader on the same file, and off again bit by bit."""

from __future__ import annotations

import torch

from diffaccel import attach
from tests import tiny


def test_alphas_of_kohya_files_count_on_attention_layers_of_sdxl() -> None:
    generator, state = torch.Generator().manual_seed(0), {}
    for name, layer in tiny.build("sdxl").unet.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.endswith(("attn1.to_q", "attn2.to_v", "ff.net.2")):
            key = "lora_unet_" + name.replace(".", "_")
            state[f"{key}.lora_down.weight"] = torch.randn(4, layer.in_features, generator=generator) * 0.3
            state[f"{key}.lora_up.weight"] = torch.randn(layer.out_features, 4, generator=generator) * 0.3
            state[f"{key}.alpha"] = torch.tensor(1.0)
    plain = tiny.build("sdxl")
    plain.load_lora_weights(dict(state), adapter_name="a")
    pipe = attach(tiny.build("sdxl"))
    pipe.acceleration.loras.load(state, "a")
    wanted = tiny.run(plain, "sdxl")
    assert (tiny.run(pipe, "sdxl") - wanted).abs().max() <= 1e-6 * wanted.abs().max()
