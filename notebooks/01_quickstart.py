# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: nbmake,tags,-all
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart: accelerate a diffusers pipeline, look at what it did, take it off again
#
# This notebook needs no GPU and downloads nothing: it runs a tiny, really trained Flux pipeline that comes with
# the package. With a large model only the loading differs; the calls are the same.

# %% tags=["parameters"] nbmake={"mock": {"N_PROMPTS": 1, "SIZE": 64, "STEPS": 20}}
STEPS = 28  # denoising steps
SIZE = 96  # side of the pictures in pixels; the model was trained at 64, 96 and 128
N_PROMPTS = 4
PRESET = "cpu-demo"  # `diffaccel.presets()` lists the others

# %% [markdown]
# ## A pipeline
#
# `testbed.load` gives an ordinary `FluxPipeline`. Each prompt has a generator of its own, so that every run starts
# from the same noise: otherwise two runs cannot be compared.

# %%
import time

import torch
from diffusers import FluxPipeline
from diffusers.utils import make_image_grid

from diffaccel import accelerate, plan, presets, restore, testbed
from diffaccel.quality import compare

pipe = testbed.load("image")
pipe.set_progress_bar_config(disable=True)
prompts = testbed.prompts("test", N_PROMPTS)
settings = testbed.call_kwargs("image") | {"height": SIZE, "width": SIZE, "num_inference_steps": STEPS}


def draw(**changes):
    """The pictures of all prompts, always from the same noise, and the seconds they took."""
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in range(N_PROMPTS)]
    start = time.perf_counter()
    images = pipe(prompts, generator=generators, **settings, **changes).images
    return images, time.perf_counter() - start


bits, _ = draw(output_type="pt")  # warms up, and is kept for the last comparison
plain, plain_s = draw()
prompts

# %% [markdown]
# ## What would be done?
#
# `plan` decides and touches nothing. The table says of each item whether it is on, how faithful it is, and why; what
# has not run yet is "unmeasured". A preset is a short text that you can copy and change.

# %%
print(presets(PRESET))
plan(pipe, PRESET)

# %% [markdown]
# ## Accelerate
#
# `accelerate` returns the same pipeline. Options override the preset, such as `cache_threshold=0.05` for a gentler
# cache, `cache=None` for none.

# %%
accelerate(pipe, PRESET)
draw()
fast, fast_s = draw()
print(f"plain {plain_s:.2f} s, accelerated {fast_s:.2f} s: {plain_s / fast_s:.2f} times as fast here")

# %% [markdown]
# Plain pictures above, accelerated ones below:

# %%
side_by_side = make_image_grid([*plain, *fast], rows=2, cols=N_PROMPTS)
side_by_side.resize((side_by_side.width * 2, side_by_side.height * 2))

# %% [markdown]
# ## What was done?
#
# The report of the last run: one letter per denoising step, `C` computed, `.` taken from the cache; the share of
# reused calls; the seconds of each stage; the memory the cache took.

# %% nbmake={"post_cell_execute": ["assert 0 < pipe.acceleration.report.hit_rate < 1"]}
pipe.acceleration.report

# %% [markdown]
# `pipe.acceleration` is the plan again, now with what the last run measured.

# %%
pipe.acceleration

# %% [markdown]
# ## How close is it?
#
# PSNR in dB (higher is closer) and SSIM (1 is the same) against the plain pictures. The testbed also has a scorer that
# reads from the pixels what the prompt asked for: shape, colour, size, place and ground.

# %%
closeness = compare(plain, fast)
scores = {"plain": testbed.score(plain, prompts)["score"], "accelerated": testbed.score(fast, prompts)["score"]}
closeness, scores

# %% [markdown]
# ## And back
#
# `restore` undoes everything: the same bits as before, and no verb, hook or attribute is left.

# %%
restore(pipe)
again, _ = draw(output_type="pt")
assert torch.equal(again, bits)
assert type(pipe) is FluxPipeline and not hasattr(pipe, "acceleration")
compare(bits, again, metrics="max_error")
