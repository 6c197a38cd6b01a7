"""Stage offload and weights: read, saved, changed, cast, replaced and tied while they are away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from diffaccel import accelerate, restore
from tests import tiny
from tests.invariants.levers import at_step, plain
from tests.offload.stages import away, inside, linux, mapped_files, staged


def test_weights_can_be_read_saved_and_changed(tmp_path: Path) -> None:
    """`state_dict` keeps its order and values, the pipeline can be saved, and what is loaded counts."""
    pipe, twin = staged("flux"), tiny.build("flux")
    tiny.run(pipe, "flux")
    for (name, module), (_, other) in zip(tiny.component_modules(pipe), tiny.component_modules(twin), strict=True):
        mine, theirs = module.state_dict(), other.state_dict()
        assert list(mine) == list(theirs) and all(torch.equal(mine[k], theirs[k]) for k in mine), name
    pipe.transformer.save_pretrained(tmp_path)
    loaded = type(twin.transformer).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), twin.transformer.parameters(), strict=True))
    for each in (pipe, twin):
        weights = {name: tensor * 1.25 for name, tensor in each.transformer.state_dict().items()}
        each.transformer.load_state_dict(weights)
        each.vae.decoder.conv_out.weight.data += 0.1
    changed = tiny.run(twin, "flux")
    assert torch.equal(tiny.run(pipe, "flux"), changed)
    assert torch.equal(tiny.run(restore(pipe), "flux"), changed), "and they stay changed"


def test_weights_changed_in_the_middle_of_a_run_stay_changed() -> None:
    def change(pipe: Any) -> None:
        pipe.transformer.proj_out.weight.data += 0.1

    outs = []
    for pipe in (staged("flux"), tiny.build("flux")):
        first = tiny.run(pipe, "flux", callback_on_step_end=at_step(2, change))
        outs.append((first, tiny.run(pipe, "flux")))
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])
    assert not torch.equal(outs[0][1], plain("flux"))


@linux
def test_cast_and_replaced_components() -> None:
    """`pipe.to(dtype)` and a component put in place of another are followed; the old one gets its memory back."""
    pipe, twin = staged("flux"), tiny.build("flux")
    tiny.run(pipe, "flux")
    old = pipe.vae
    for each in (pipe, twin):
        each.to(torch.float64)
        each.vae = tiny.build("flux", seed=1).vae.to(torch.float64)
    assert torch.equal(tiny.run(pipe, "flux"), tiny.run(twin, "flux")) and inside(pipe) == set()
    assert not away(old, mapped_files())


def test_tied_weights_stay_tied() -> None:
    """Parameters that share memory, within a component and across two, are moved as one."""
    pipe = tiny.build("sd3")
    pipe.text_encoder_2.text_model.embeddings.token_embedding.weight = (
        pipe.text_encoder.text_model.embeddings.token_embedding.weight
    )
    reference = tiny.run(pipe, "sd3")
    accelerate(pipe, None, strict=True, offload="stage", offload_in_turn=True)
    assert torch.equal(tiny.run(pipe, "sd3"), reference)
    one = pipe.text_encoder.text_model.embeddings.token_embedding.weight
    assert pipe.text_encoder_2.text_model.embeddings.token_embedding.weight is one


def test_the_pipeline_knows_its_device() -> None:
    pipe = staged("flux")
    cpu = torch.device("cpu")
    assert (pipe.device, pipe._execution_device, pipe.dtype) == (cpu, cpu, torch.float32)
    vars(pipe)["_diffaccel_device"] = torch.device("cuda", 0)  # as it is with weights on the host of a GPU
    assert pipe.device.type == pipe._execution_device.type == "cuda"
    pipe.to("cpu")
    assert pipe._execution_device == cpu
