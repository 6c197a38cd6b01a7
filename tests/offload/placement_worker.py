"""Started by test_predict: memory of one process that runs a medium pipeline, plain or with stage offload.

Prints one line of JSON: the predicted peak, the peak of the resident set above what it was before the pipeline was
built, and the most weight bytes that lay in memory (not in a mapped file) when a component was called.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import diffusers
import torch
import transformers

from diffaccel import accelerate
from diffaccel.models.registry import lookup
from diffaccel.offload.components import component_sizes
from diffaccel.offload.stage.peak import Placement, predict_peak
from tests import tiny
from tests.models.families.parts import flow

MIB = 1024**2


def medium() -> Any:
    """A FLUX pipeline of 75 million weights: encoders 93 MiB, denoiser 160 MiB, decoder 33 MiB."""
    t5 = transformers.T5Config(
        vocab_size=128, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, feed_forward_proj="gated-gelu"
    )
    denoiser = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=5,
        attention_head_dim=64,
        num_attention_heads=8,
        joint_attention_dim=512,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(16, 24, 24),
    )
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(192,),
        layers_per_block=2,
        latent_channels=4,
        norm_num_groups=32,
        shift_factor=0.06,
        scaling_factor=1.5,
    )
    small = tiny.build("flux").components
    pipe = diffusers.FluxPipeline(
        transformer=denoiser,
        text_encoder=small["text_encoder"],
        text_encoder_2=transformers.T5EncoderModel(t5).eval(),
        tokenizer=small["tokenizer"],
        tokenizer_2=small["tokenizer_2"],
        vae=vae.eval(),
        scheduler=flow(shift=3.0),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def status(name: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def reset_peak() -> None:
    """From here on the peak of the resident set is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")


def bytes_in_memory(pipe: Any) -> int:
    """Weight bytes of all components that do not lie in a mapped file."""
    files = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[5].startswith("/"):
            low, high = fields[0].split("-")
            files.append((int(low, 16), int(high, 16)))
    seen: dict[int, int] = {}
    for _, module in tiny.component_modules(pipe):
        for tensor in (*module.parameters(), *module.buffers()):
            at = tensor.data_ptr()
            if not any(low <= at < high for low, high in files):
                seen[at] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def main(how: str) -> None:
    """Build, accelerate, run; print."""
    tiny.run(tiny.build("flux"), "flux", num_inference_steps=1)  # libraries load what they load late
    before = status("VmRSS")
    torch.manual_seed(0)
    pipe = medium()
    spec = lookup(pipe)
    predicted = predict_peak(
        component_sizes(pipe, spec), Placement("disk" if how == "stage" else "device"), "cpu", kept_bytes=MIB
    )
    if how == "stage":
        accelerate(pipe, None, strict=True, offload="stage", offload_text_cache_bytes=MIB)
        limit = pipe.acceleration.plan.item("offload.stage").predicted["host_gib"]
        assert abs(limit * 1024**3 - predicted.host_bytes) < MIB, "the plan says the same"
    live: list[int] = []
    for name in ("text_encoder_2", "transformer", "vae"):
        inner = [m for m in getattr(pipe, name).modules() if next(m.parameters(recurse=False), None) is not None][-1]
        inner.register_forward_hook(lambda *_: live.append(bytes_in_memory(pipe)))
    reset_peak()
    pictures = tiny.run(pipe, "flux", num_inference_steps=2)
    peak = status("VmHWM") - before
    print(
        json.dumps(
            {
                "predicted_bytes": predicted.host_bytes,
                "rss_bytes": peak,
                "live_bytes": max(live),
                "sum": hashlib.sha256(pictures.numpy().tobytes()).hexdigest(),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
