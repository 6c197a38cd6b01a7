"""The faults that the doctor knows by name: what each is, by what it is told, and what to do next.

docs/doctor.md shows this table; a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass

PIPELINE, LEVER, LIBRARY, MACHINE = "pipeline", "lever", "library", "machine"  # whose fault it is


@dataclass(frozen=True)
class Fault:
    """One row: `kind` says where it lies, `signal` by what it is told, `next_step` what to do."""

    name: str
    kind: str
    title: str
    signal: str
    next_step: str


_ROWS = (
    Fault(
        "vae-oom", PIPELINE, "the VAE runs out of memory",
        "out of memory raised inside the VAE, or its computed peak above the memory of the device",
        "pipe.enable_vae_tiling(exact=True); then a smaller size, or offload='stage'",
    ),
    Fault(
        "not-finite", PIPELINE, "NaN or infinity, as FP8 and FP16 overflow give",
        "a picture with NaN, or a lever's own guard; the first layer whose output is not finite is named",
        "keep the named layer in 16 bits (quantization_keep), use scheme='dynamic', or load the VAE in float32",
    ),
    Fault(
        "colour-shift", LEVER, "FP8 or another lever moves the colours",
        "channel means off by more than 2 % of the range, and most of the error is that",
        "quantization_guard='reference' names the layers; keep them with quantization_keep, or scales per row",
    ),
    Fault(
        "flat-picture", PIPELINE, "black or flat pictures",
        "no picture has a spread above 1/255",
        "look for overflow: run in bfloat16 or float32 (the VAE first); a safety checker also paints black",
    ),
    Fault(
        "artefacts", LEVER, "cache artefacts and flicker",
        "below 25 dB to the same run without the lever, or a flicker 1.5 times its own",
        "level='careful', a smaller threshold or tolerance, more warm-up steps; diffaccel tune finds a setting",
    ),
    Fault(
        "recompile-storm", LEVER, "graphs are compiled again and again",
        "an identical second call, or a third size, compiles graphs; or torch gave up at its limit",
        "compile_dynamic=True, a few fixed sizes, and nothing that changes between calls inside the graphs",
    ),
    Fault(
        "lora-no-effect", PIPELINE, "a LoRA without effect",
        "the same picture, bit by bit, with and without the adapter that is on",
        "look at pipe.acceleration.loras.report; unfuse projections, switch it on (set_adapters), check the file",
    ),
    Fault(
        "lora-wrong-scale", PIPELINE, "a LoRA of the wrong scale",
        "factors that differ from alpha/rank by layer, two adapters with the same weights, or other numbers than the "
        "file's",
        "set strengths once (they are absolute in pipe.acceleration.loras), unload twins, pass the file to compare",
    ),
    Fault(
        "truncated-prompt", PIPELINE, "the end of the prompt is not read",
        "every tokenizer that saw the prompt cut it",
        "a shorter prompt, or a larger max_sequence_length where the model allows one",
    ),
    Fault(
        "temporal-seams", PIPELINE, "seams where a video was decoded in pieces",
        "at single frames the difference to a decode without tiles jumps by half of what frames differ by, or more",
        "a larger overlap in time, or enable_vae_tiling(exact=True)",
    ),
    Fault(
        "silent-fallback", LEVER, "something that is on does nothing",
        "a lever that is enabled answered no call, all its calls fell back, or no layer obeys a chosen backend",
        "the reason stands in the finding; choose what fits, or strict=True to have it raised",
    ),
    Fault(
        "displaced-lever", LEVER, "another library pushed a lever out",
        "hooks, processors or layers of the lever are no longer the ones in place",
        "set up the other library first, then accelerate; or enable the lever again",
    ),
    Fault(
        "host-memory", MACHINE, "kept originals eat the host's memory",
        "original weights kept in RAM take more than a quarter of what the host has free",
        "quantization_keep_original='disk' or 'source'",
    ),
    Fault(
        "wrong-machine", MACHINE, "planned for another machine",
        "the plan names another device, or what it puts there is more than its memory",
        "leave hardware= out, or give Budget(memory_gib=...); offload or quantize what does not fit",
    ),
    Fault(
        "cut-off-cache", LIBRARY, "diffusers' own cache is on and leaves nothing out",
        "a cache is on, and its hooks are missing or out of the chain of calls, so that every block is run",
        "disable_cache() and enable it again after offload; or a cache of diffaccel in its place",
    ),
    Fault(
        "dirty-cache", LIBRARY, "diffusers' own cache holds state from an earlier run",
        "tensors in the state of its hooks between two calls (a run that raised leaves them)",
        "pipe.transformer._reset_stateful_cache() after an exception; caches of diffaccel start clean",
    ),
    Fault(
        "mixed-branches", LIBRARY, "one cache for both guidance branches",
        "pyramid attention broadcast or FasterCache, which count calls, where each branch is a call of its own",
        "disable it, or use a cache that keeps branches apart (any of diffaccel's)",
    ),
    Fault(
        "moved-backend", LIBRARY, "the attention backend of the whole process was moved",
        "diffusers' process-wide backend is not its default: other models and the VAE follow it",
        "choose it for one pipeline: enable_attention(...) here; set the process-wide one back",
    ),
    Fault(
        "casting-undone", LIBRARY, "layerwise casting no longer saves memory",
        "layers with its hook hold weights of another dtype than the one for storage",
        "do not call .to(dtype) after enable_layerwise_casting",
    ),
    Fault(
        "decode-size", LIBRARY, "tiled decoding gives another size",
        "the tiled picture has another shape than the same latents decoded whole",
        "tile sizes that are multiples of the VAE's factor (pipe.enable_vae_tiling checks them)",
    ),
    Fault(
        "undo", LEVER, "a lever that leaves a trace",
        "after restore: other bits, other attributes or hooks than before",
        "report it with the trial's line: it is a fault of diffaccel or of a library that came in between",
    ),
    Fault(
        "off-plan", LEVER, "more memory than the plan says",
        "a measured peak more than 5 % above the predicted one, or bytes held after a run",
        "report it with the trial's line",
    ),
    Fault(
        "crash", PIPELINE, "the run raises",
        "any other exception",
        "the message stands in the finding; try the pipeline without levers (restore) to see whose it is",
    ),
    Fault(
        "other-nunchaku", MACHINE, "the wrong nunchaku is installed",
        "the files of the installed package: no compiled kernels of the quantization library among them",
        "pip uninstall nunchaku, then a wheel from https://github.com/nunchaku-ai/nunchaku/releases",
    ),
    Fault(
        "driver", MACHINE, "PyTorch cannot use the GPU",
        "a PyTorch built for a GPU that finds none though a driver or device is there, or the other way round",
        "a driver for the CUDA version of this PyTorch, or a PyTorch for this driver",
    ),
    Fault(
        "versions", MACHINE, "a version this package was not made for",
        "private names of diffusers or PyTorch that it leans on are not there",
        "install the versions of pyproject.toml",
    ),
)  # fmt: skip

FAULTS: dict[str, Fault] = {row.name: row for row in _ROWS}
