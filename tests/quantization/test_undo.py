"""Where the originals stay, and what undo gives back: their very bits, or a refusal that says why."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from diffaccel import accelerate, restore
from diffaccel.errors import IncompatibleError
from diffaccel.quantization import originals
from diffaccel.quantization.originals import Checkpoint, Originals, digest
from diffaccel.quantization.swap import Swapped, users
from diffaccel.quantization.weights import ScaledWeight
from tests import tiny
from tests.fingerprint import differences, snapshot_pipe


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Flux pipeline, its transformer in several files."""
    folder = tmp_path_factory.mktemp("flux")
    tiny.build("flux").save_pretrained(folder, max_shard_size="60KB")
    return folder


def _load(folder: Path, **more: Any) -> Any:
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32, **more)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _codes(pipe: Any) -> list[nn.Parameter]:
    return [p for p in pipe.transformer.parameters() if isinstance(p, ScaledWeight)]


def _counts(pipe: Any) -> dict[str, int]:
    tiny.run(pipe, "flux", num_inference_steps=1)
    counts: dict[str, int] = pipe.acceleration.plan.items[0].measured["originals"]
    return counts


@pytest.mark.parametrize("mode", ("source", "disk", "host", None))
def test_the_very_bits_and_the_very_objects(saved: Path, mode: str | None) -> None:
    pipe = _load(saved)
    plain = tiny.run(pipe, "flux")
    bits = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    objects = dict(pipe.transformer.named_parameters())
    before = snapshot_pipe(pipe)
    options = {} if mode is None else {"quantization_keep_original": mode}
    accelerate(pipe, None, quantization="fp8", strict=True, **options)
    emptied = sum(p.numel() == 0 for p in objects.values())
    assert emptied == (0 if mode == "host" else 34), "the bytes of the originals are given up"
    assert _counts(pipe) == {mode or "source": 34}
    restore(pipe)
    assert differences(before, snapshot_pipe(pipe)) == []
    assert list(pipe.transformer.state_dict()) == list(bits)
    assert all(torch.equal(value, bits[name]) for name, value in pipe.transformer.state_dict().items())
    assert all(p is objects[name] for name, p in pipe.transformer.named_parameters())
    assert torch.equal(tiny.run(pipe, "flux"), plain)


def test_no_originals_no_undo_and_nothing_half_done() -> None:
    pipe = tiny.build("flux")
    accelerate(pipe, None, quantization="fp8", quantization_keep_original="no", strict=True)
    quantized = tiny.run(pipe, "flux")
    weights = _codes(pipe)
    for act in (
        lambda: restore(pipe),
        pipe.disable_quantization,
        lambda: pipe.enable_int8(),
        lambda: accelerate(pipe, None, cache="first_block"),
    ):
        with pytest.raises(IncompatibleError, match="keep_original='no' kept no original weights"):
            act()
        assert torch.equal(tiny.run(pipe, "flux"), quantized)
    pipe.enable_first_block_cache(threshold=0.0, min_steps=0)
    assert torch.equal(tiny.run(pipe, "flux"), quantized), "what is not the weights still comes"
    pipe.disable_cache()
    assert all(a is b for a, b in zip(_codes(pipe), weights, strict=True))
    assert pipe.acceleration.plan.enabled == ("quantization.fp8",)


def test_other_levers_come_and_go_and_nothing_is_quantized_again() -> None:
    pipe = tiny.build("flux")
    plain = tiny.run(pipe, "flux")
    accelerate(pipe, None, quantization="int8", compile=False, strict=True)
    weights = _codes(pipe)
    quantized = tiny.run(pipe, "flux")
    pipe.enable_first_block_cache(threshold=1e9, min_steps=0, last_steps=0)
    assert not torch.equal(tiny.run(pipe, "flux"), quantized)
    with pytest.raises(Exception, match="shape"):
        tiny.run(pipe, "flux", latents=torch.zeros(1, 3, 5))
    pipe.disable_cache()
    assert all(a is b for a, b in zip(_codes(pipe), weights, strict=True)), "the same objects: kept, not made again"
    assert torch.equal(tiny.run(pipe, "flux"), quantized)
    pipe.enable_int8(scheme="weight_only")
    assert not any(a is b for a, b in zip(_codes(pipe), weights, strict=True)), "another config is another weight"
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "flux"), plain)


def test_a_replaced_denoiser_is_quantized_too() -> None:
    pipe = tiny.build("flux")
    accelerate(pipe, None, quantization="fp8", strict=True)
    old, new = pipe.transformer, tiny.build("flux", seed=1).transformer
    pipe.register_modules(transformer=new)
    tiny.run(pipe, "flux")
    assert len(_codes(pipe)) == 34
    assert not any(isinstance(p, ScaledWeight) for p in old.parameters()), "and the old one has its weights back"


def test_a_checkpoint_that_changed_is_a_refusal_before_anything_is_undone(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    pipe = _load(folder)
    accelerate(pipe, None, quantization="fp8", quantization_keep_original="source", cache="first_block", strict=True)
    out = tiny.run(pipe, "flux")
    name = "transformer_blocks.0.attn.to_q.weight"
    file = Checkpoint(folder / "transformer").files[name][0]
    content, good = load_file(file), file.read_bytes()
    content[name][0, 0] += 1e-3
    file.unlink()
    save_file(content, file)
    with pytest.raises(IncompatibleError, match=name):
        restore(pipe)
    assert torch.equal(tiny.run(pipe, "flux"), out) and len(pipe.acceleration.plan.enabled) == 2
    file.unlink()
    file.write_bytes(good)
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "flux"), tiny.run(_load(folder), "flux"))


def test_weights_changed_since_loading_stay_on_the_host(saved: Path) -> None:
    """A fused adapter, a fine-tuned layer: the checkpoint does not have these bits."""
    pipe = _load(saved)
    name = "transformer_blocks.0.attn.to_q"
    with torch.no_grad():
        pipe.transformer.get_submodule(name).weight.mul_(1.5)
    mine = pipe.transformer.get_submodule(name).weight.detach().clone()
    accelerate(pipe, None, quantization="fp8", quantization_keep_original="source", strict=True)
    assert _counts(pipe) == {"source": 33, "host": 1}
    restore(pipe)
    assert torch.equal(pipe.transformer.get_submodule(name).weight, mine)


def test_a_variant_and_a_cast(tmp_path: Path) -> None:
    """Loaded in another dtype than saved, with a half-precision variant in the same folder."""
    pipe = tiny.build("flux")
    pipe.save_pretrained(tmp_path)
    pipe.transformer.half().save_pretrained(tmp_path / "transformer", variant="fp16")
    found = Checkpoint(tmp_path / "transformer")
    assert {len(files) for files in found.files.values()} == {2}
    from diffusers import FluxPipeline

    loaded = FluxPipeline.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    loaded.set_progress_bar_config(disable=True)
    bits = {n: p.detach().clone() for n, p in loaded.transformer.named_parameters()}
    accelerate(loaded, None, quantization="fp8", quantization_keep_original="source", strict=True)
    assert _counts(loaded) == {"source": 34}
    restore(loaded)
    assert all(torch.equal(p, bits[n]) for n, p in loaded.transformer.named_parameters())


def test_files_of_ours_go_with_the_undo_and_with_the_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(originals.tempfile, "tempdir", str(tmp_path))
    pipe = tiny.build("flux")
    accelerate(pipe, None, quantization="fp8", quantization_keep_original="disk", strict=True)
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 34
    restore(pipe)
    assert list(tmp_path.iterdir()) == []
    accelerate(pipe, None, quantization="fp8", quantization_keep_original="disk", strict=True)
    shutil.rmtree(next(tmp_path.iterdir()))
    with pytest.raises(IncompatibleError, match="is gone"):
        restore(pipe)
    keep = Originals("disk")
    keep.take("x", nn.Parameter(torch.ones(2)))
    assert list(tmp_path.iterdir())
    del keep
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_shared_parameters() -> None:
    """One weight in two layers is quantized once; one that an unquantized layer uses too keeps its bytes."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4), "d": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    model["d"].weight = model["c"].weight
    first, third = model["a"].weight, model["c"].weight
    names = ("a", "b", "c")
    part = Swapped(model, Originals("disk", shared=users(model, names)))
    part.put_on(names, lambda w: ScaledWeight.of(w, torch.int8, "weight_only"))
    assert model["a"].weight is model["b"].weight and model["a"].weight is not first and first.numel() == 0
    assert model["d"].weight is third and third.numel() == 16 and part.originals.counts() == {"disk": 1, "host": 1}
    part.take_off()
    assert model["a"].weight is model["b"].weight is first and model["c"].weight is model["d"].weight is third


def test_a_weight_somebody_else_put_there_since_stays() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    part = Swapped(model, Originals("host"))
    part.put_on(("a", "b"), lambda w: ScaledWeight.of(w, torch.int8, "weight_only"))
    mine = nn.Parameter(torch.zeros(4, 4))
    model["a"].weight = mine
    part.take_off()
    assert model["a"].weight is mine and not isinstance(model["b"].weight, ScaledWeight)


def test_an_error_half_way_leaves_everything_as_it_was() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    before = {name: layer.weight for name, layer in model.items()}

    def convert(weight: torch.Tensor) -> torch.Tensor:
        if weight is before["b"]:
            raise RuntimeError("out of memory")
        return ScaledWeight.of(weight, torch.int8, "weight_only")

    with pytest.raises(RuntimeError, match="out of memory"):
        Swapped(model, Originals("disk")).put_on(("a", "b"), convert)
    assert all(model[name].weight is weight and weight.numel() == 16 for name, weight in before.items())


def test_the_hash_is_of_bytes_dtype_and_shape() -> None:
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    assert digest(tensor) == digest(tensor.clone()) == digest(tensor.t().contiguous().t())
    others = (tensor + 1, tensor.reshape(4, 3), tensor.to(torch.float16), tensor[:2])
    assert len({digest(tensor), *(digest(t) for t in others)}) == 5


def test_saving_quantized_weights_is_refused_by_name(tmp_path: Path) -> None:
    pipe = accelerate(tiny.build("flux"), None, quantization="int8", quantization_scheme="weight_only")
    with pytest.raises(IncompatibleError, match=r"save_pretrained: quantization\.int8.*disable_quantization"):
        pipe.save_pretrained(tmp_path / "quantized")
    assert not (tmp_path / "quantized").exists()
    pipe.disable_quantization().save_pretrained(tmp_path / "plain")
    assert (tmp_path / "plain" / "model_index.json").exists()
