"""A checkpoint of one file, in the layout in which the authors of Wan publish theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests import tiny
from tests.loaded.quantizers import with_transformer

# What they call the layers of a block and those around.
NAMES = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "proj_out": "head.head",
    "attn1": "self_attn",
    "attn2": "cross_attn",
    "to_out.0": "o",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "norm2": "norm3",
}


def authors_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a Wan transformer under their authors' names; none is a name of diffusers."""
    found = {}
    for name, value in model.state_dict().items():
        for mine, theirs in NAMES.items():
            name = name.replace(mine, theirs)
        name = "head.modulation" if name == "scale_shift_table" else name.replace("scale_shift_table", "modulation")
        found[f"model.diffusion_model.{name}"] = value.clone()
    assert not set(found) & set(model.state_dict())
    return found


def single_file() -> Any:
    """A pipeline whose transformer was loaded by `from_single_file`, with the config of a folder."""
    pipe = tiny.build("wan")
    truth = pipe.transformer.state_dict()

    def load(folder: str) -> Any:
        path = Path(folder, "model.safetensors")
        save_file(authors_state(pipe.transformer), path)
        kind = type(pipe.transformer)
        return kind.from_single_file(str(path), config=folder, subfolder="transformer", torch_dtype=torch.float32)

    made = with_transformer(load, pipe)
    loaded = made.transformer.state_dict()
    assert list(loaded) == list(truth) and all(torch.equal(loaded[name], truth[name]) for name in truth)
    return made
