"""Stage offload on tiny pipelines, the disk as the store and the CPU as the device: everything but the GPU is real."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import Budget, Plan, accelerate, attach, plan, restore
from diffaccel.errors import BudgetError, DiffaccelError, IncompatibleError, InvalidOptionError
from diffaccel.memory.stage_switch import Seen
from diffaccel.memory.turns import Unit
from tests import tiny
from tests.families import table
from tests.fingerprint import assert_same, snapshot_pipe
from tests.invariants.levers import Stop, at_step, plain, raise_at

FAMILIES = ("flux", "wan", "wan22", "sd3", "flux_img2img")
ITEM = "offload.stage"
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def staged(family: str = "flux", **options: Any) -> Any:
    """A fresh pipeline with stages on disk; a raised error where that cannot be."""
    parameters = {f"offload_{name}": value for name, value in options.items()}
    return accelerate(tiny.build(family), None, strict=True, offload="stage", **parameters)


def mapped_files() -> list[tuple[int, int]]:
    """Where files are mapped into this process: asked of the system, not of us."""
    files = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[5].startswith("/"):
            low, high = fields[0].split("-")
            files.append((int(low, 16), int(high, 16)))
    return files


def away(module: torch.nn.Module, files: list[tuple[int, int]]) -> bool:
    """Do its weights lie in a mapped file? A first and a last one are asked; mixtures are an error."""
    tensors = [p for p in module.parameters() if p.numel()]
    found = {any(low <= p.data_ptr() < high for low, high in files) for p in (tensors[0], tensors[-1])}
    assert len(found) == 1, "half of a component is away"
    return found == {True}


def inside(pipe: Any) -> set[str]:
    """Names of the components that are in memory."""
    files = mapped_files()
    return {name for name, module in tiny.component_modules(pipe) if not away(module, files)}


def leaf(module: torch.nn.Module) -> torch.nn.Module:
    """The last module inside that has weights of its own (T5's first one is never called)."""
    return [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None][-1]


def weights(module: torch.nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def watch(pipe: Any) -> list[tuple[str, set[str]]]:
    """(component, components in memory) at each of its calls, changes only."""
    seen: list[tuple[str, set[str]]] = []

    def at(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            entry = (name, inside(pipe))
            if not seen or seen[-1] != entry:
                seen.append(entry)

        return hook

    for name, module in tiny.component_modules(pipe):
        for part in (
            (getattr(module, "encoder", None), getattr(module, "decoder", None)) if name == "vae" else (module,)
        ):
            assert part is not None
            leaf(part).register_forward_hook(at(name))
    return seen


def stats(pipe: Any) -> dict[str, Any]:
    """What the last run measured."""
    found: dict[str, Any] = pipe.acceleration.report.stats[ITEM]
    return found


# ---- the same picture, in turns --------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("family", FAMILIES)
def test_bit_equal_and_in_turns(family: str) -> None:
    """Two runs equal the plain pipeline; nobody is in beside the stage at work; all are away in between."""
    pipe = staged(family)
    assert inside(pipe) == set(), "away as soon as it is on"
    seen = watch(pipe)
    assert torch.equal(tiny.run(pipe, family), plain(family))
    encoders = {name for name, _ in tiny.component_modules(pipe) if name.startswith("text_encoder")}
    assert {name for name, _ in seen} == {name for name, _ in tiny.component_modules(pipe)}, "all were called"
    for name, there in seen:
        assert there <= (encoders if name in encoders else {name}), (name, there)
    assert inside(pipe) == set()
    assert torch.equal(tiny.run(pipe, family), plain(family))
    assert restore(pipe) is pipe and len(inside(pipe)) == len(list(tiny.component_modules(pipe)))
    assert torch.equal(tiny.run(pipe, family), plain(family))


def test_the_vae_comes_for_encode_too() -> None:
    """Found by its own call: in image-to-image it is brought in twice, in text-to-image once."""
    pipe = staged("flux_img2img")
    tiny.run(pipe, "flux_img2img")
    twice = stats(pipe)
    vae = twice["decode_in_bytes"]
    assert vae > 0
    text = staged("flux")
    tiny.run(text, "flux")
    assert twice["encode_in_bytes"] - stats(text)["encode_in_bytes"] == vae == stats(text)["decode_in_bytes"]


@pytest.mark.parametrize("family", ["flux", "wan22"])
def test_stats_say_what_moved(family: str) -> None:
    """Bytes in are the weights (with the gaps of the files), each once; nothing is written; peaks are the largest."""
    pipe = tiny.build(family)
    sizes = {name: weights(module) for name, module in tiny.component_modules(pipe)}
    accelerate(pipe, None, offload="stage", strict=True)
    tiny.run(pipe, family)
    found = stats(pipe)
    experts = [size for name, size in sizes.items() if name.startswith("transformer")]
    encoders = sum(size for name, size in sizes.items() if name.startswith("text_encoder"))
    assert found["denoise_in_bytes"] == pytest.approx(sum(experts), rel=0.05)
    assert found["denoise_peak_bytes"] == pytest.approx(max(experts), rel=0.01)
    assert found["encode_peak_bytes"] == pytest.approx(encoders, rel=0.01)
    assert found["decode_in_bytes"] == pytest.approx(sizes["vae"], rel=0.15)
    assert all(found[f"{moment}_written_bytes"] == 0 for moment in ("encode", "denoise", "decode"))
    assert all(found[f"{moment}_wait_s"] > 0 for moment in ("encode", "denoise", "decode"))


@linux
def test_encoders_one_at_a_time() -> None:
    pipe = staged("sd3", in_turn=True)
    seen = watch(pipe)
    assert torch.equal(tiny.run(pipe, "sd3"), plain("sd3"))
    assert all(there == {name} for name, there in seen), seen


@linux
def test_kept_components_stay() -> None:
    pipe = staged("flux", keep=("vae", "text_encoder"))
    assert inside(pipe) == {"vae", "text_encoder"}
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))
    assert inside(pipe) == {"vae", "text_encoder"}


@pytest.mark.parametrize("name", ["flux_controlnet", "wan_i2v"])
def test_other_components(name: str) -> None:
    """A ControlNet stays in with the denoiser; an image encoder and the VAE take turns before it."""
    before = table.run(table.build(name), name)
    pipe = accelerate(table.build(name), None, strict=True, offload="stage")
    assert all(map(torch.equal, before, table.run(pipe, name)))
    sizes = {key: weights(module) for key, module in tiny.component_modules(pipe)}
    denoise = sizes["transformer"] + sizes.get("controlnet", 0)
    assert stats(pipe)["denoise_in_bytes"] == pytest.approx(denoise, rel=0.05), "each once, not in every step"


def test_who_works_between_denoiser_calls_is_found() -> None:
    """Called before and after: no. Called between two calls of one loop: yes. In another loop: no."""

    class At:
        loop = 0

    run: Any = At()
    denoiser, other = Unit(("transformer",), (), "denoise", True), Unit(("adapter",), (), "encode")
    seen = Seen()
    assert [seen.note(unit, run) for unit in (other, denoiser, denoiser)] == [[], [], []]
    assert seen.note(other, run) == [] and seen.moment == "decode"
    assert seen.note(denoiser, run) == [other] and seen.moment == "denoise"
    run.loop = 1
    assert seen.note(other, run) == [] and seen.note(denoiser, run) == []


# ---- text encoders -----------------------------------------------------------------------------------------


def calls_of(module: torch.nn.Module) -> list[int]:
    """Counts the calls of a component, in a list of one."""
    count = [0]
    leaf(module).register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    return count


def test_a_known_prompt_neither_calls_nor_loads_an_encoder() -> None:
    pipe = staged("flux")
    counts = [calls_of(pipe.text_encoder), calls_of(pipe.text_encoder_2)]
    first = tiny.run(pipe, "flux")
    assert counts == [[1], [1]] and stats(pipe)["text_misses"] == 2
    again = tiny.run(pipe, "flux")
    assert counts == [[1], [1]] and stats(pipe)["text_hits"] == 2 and stats(pipe)["encode_in_bytes"] == 0
    assert torch.equal(first, again)
    other = tiny.run(pipe, "flux", prompt=tiny.PROMPTS[1])
    assert counts == [[2], [2]] and torch.equal(other, plain("flux", prompt=tiny.PROMPTS[1]))
    longer = tiny.run(pipe, "flux", max_sequence_length=12)
    assert counts == [[2], [3]], "another length of the long prompt, the same short one"
    assert torch.equal(longer, plain("flux", max_sequence_length=12))


def test_the_cap_in_bytes() -> None:
    """Two prompts do not fit where the cap is that of one; 0 keeps nothing."""
    pipe = staged("flux")
    tiny.run(pipe, "flux")
    one = stats(pipe)["text_bytes"]
    assert one > 0
    pipe = staged("flux", text_cache_bytes=one)
    for number in (0, 1, 1, 0):
        out = tiny.run(pipe, "flux", prompt=tiny.PROMPTS[number])
        assert torch.equal(out, plain("flux", prompt=tiny.PROMPTS[number]))
        assert stats(pipe)["text_bytes"] <= one
    assert stats(pipe)["text_hits"] == 0
    pipe = staged("flux", text_cache_bytes=0)
    counts = calls_of(pipe.text_encoder)
    assert all(torch.equal(tiny.run(pipe, "flux"), plain("flux")) for _ in range(2)) and counts == [2]


def _load(encoder: torch.nn.Module) -> None:
    encoder.load_state_dict({name: tensor * 1.5 for name, tensor in encoder.state_dict().items()})


def _merge(encoder: torch.nn.Module) -> None:
    for parameter in encoder.parameters():
        parameter.data += 0.1  # how an adapter is merged: PyTorch counts no write


def _replace(encoder: torch.nn.Module) -> None:
    for child in encoder.modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is not None:
                child._parameters[name] = torch.nn.Parameter(parameter.detach() * 0.5)


def _set(encoder: torch.nn.Module) -> None:
    for child in encoder.modules():
        if hasattr(child, "eps"):
            child.eps = 0.5
        if hasattr(child, "variance_epsilon"):
            child.variance_epsilon = 0.5


@pytest.mark.parametrize("change", [_load, _merge, _replace, _set])
def test_changed_encoders_are_noticed(change: Callable[[torch.nn.Module], None]) -> None:
    """After a change between runs, the picture is that of a plain pipeline so changed."""
    twin = tiny.build("flux")
    for encoder in (twin.text_encoder, twin.text_encoder_2):
        change(encoder)
    pipe = staged("flux")
    tiny.run(pipe, "flux")
    for encoder in (pipe.text_encoder, pipe.text_encoder_2):
        change(encoder)
    changed = tiny.run(twin, "flux")
    assert not torch.equal(changed, plain("flux"))
    assert torch.equal(tiny.run(pipe, "flux"), changed) and stats(pipe)["text_hits"] == 0
    assert torch.equal(tiny.run(pipe, "flux"), changed) and stats(pipe)["text_hits"] == 2


def test_an_adapter_on_a_text_encoder() -> None:
    """A LoRA put on between runs, its scale, and switching it off: each picture is that of a plain pipeline."""
    peft = pytest.importorskip("peft")

    def adapt(pipe: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            peft.inject_adapter_in_model(config, pipe.text_encoder)

    def layers(pipe: Any) -> list[Any]:
        return [child for child in pipe.text_encoder.modules() if hasattr(child, "lora_A")]

    def scale(pipe: Any) -> None:
        for layer in layers(pipe):
            layer.scaling["default"] = 3.0

    def disable(pipe: Any) -> None:
        for layer in layers(pipe):
            layer.enable_adapters(False)

    pipe, twin = staged("flux"), tiny.build("flux")
    seen = [tiny.run(pipe, "flux")]
    for change in (adapt, scale, disable):
        for each in (pipe, twin):
            change(each)
        seen.append(tiny.run(pipe, "flux"))
        assert torch.equal(seen[-1], tiny.run(twin, "flux"))
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[0], seen[3])


def test_a_store_outlives_the_pipeline(tmp_path: Path) -> None:
    """Another pipeline of equal weights calls no encoder; one of other weights does, and both are right."""
    tiny.run(staged("flux", text_store=tmp_path), "flux")
    assert len(list(tmp_path.iterdir())) == 2
    twin = staged("flux", text_store=tmp_path, text_cache_bytes=0)
    counts = calls_of(twin.text_encoder_2)
    assert torch.equal(tiny.run(twin, "flux"), plain("flux")) and counts == [0]
    other = accelerate(tiny.build("flux", seed=1), None, offload="stage", offload_text_store=str(tmp_path))
    counts = calls_of(other.text_encoder_2)
    assert torch.equal(tiny.run(other, "flux"), tiny.run(tiny.build("flux", seed=1), "flux")) and counts == [1]


def test_what_the_caller_writes_into_stays_his() -> None:
    pipe = staged("flux")
    first = pipe.encode_prompt(tiny.PROMPTS[0], None, max_sequence_length=tiny.TEXT_TOKENS)
    first[0].zero_()
    again = pipe.encode_prompt(tiny.PROMPTS[0], None, max_sequence_length=tiny.TEXT_TOKENS)
    plainly = tiny.build("flux").encode_prompt(tiny.PROMPTS[0], None, max_sequence_length=tiny.TEXT_TOKENS)
    assert all(map(torch.equal, again, plainly))


# ---- runs that go wrong, runs in runs --------------------------------------------------------------------


@linux
@pytest.mark.parametrize("error", [Stop("stop"), KeyboardInterrupt()])
def test_a_run_that_fails_leaves_nothing(error: BaseException) -> None:
    pipe = staged("wan22")
    with pytest.raises(type(error)):
        tiny.run(pipe, "wan22", callback_on_step_end=raise_at(2, error))
    assert inside(pipe) == set()
    assert torch.equal(tiny.run(pipe, "wan22"), plain("wan22"))


def test_other_sizes_and_prompts_between() -> None:
    pipe = staged("wan")
    for size in (
        {},
        {"height": 32, "width": 48},
        {},
        {"prompt": list(tiny.PROMPTS[:2]), "negative_prompt": ["a", "b"]},
    ):
        assert torch.equal(tiny.run(pipe, "wan", **size), plain("wan", **size))


def test_a_run_inside_a_run() -> None:
    """The text encoder comes while the denoiser waits; both pictures are right."""
    pipe = staged("flux")
    inner: list[torch.Tensor] = []

    def nested(_: Any) -> None:
        inner.append(tiny.run(pipe, "flux", prompt=tiny.PROMPTS[1], seed=3))

    outer = tiny.run(pipe, "flux", callback_on_step_end=at_step(2, nested))
    assert torch.equal(outer, plain("flux"))
    assert torch.equal(inner[0], plain("flux", prompt=tiny.PROMPTS[1], seed=3))


def test_snapshot_and_resume() -> None:
    pipe = staged("flux")
    taken: list[Any] = []

    def pause(pipe_: Any) -> None:
        taken.append(pipe.acceleration.snapshot())
        raise Stop

    with pytest.raises(Stop):
        tiny.run(pipe, "flux", callback_on_step_end=at_step(2, pause))
    tiny.run(pipe, "flux", prompt=tiny.PROMPTS[2])
    assert torch.equal(tiny.output(pipe.acceleration.resume(taken[0])), plain("flux"))


@linux
def test_components_called_by_hand() -> None:
    """Outside of a run a component comes for the call and leaves again; its submodules bring it in as well."""
    pipe, twin = staged("flux"), tiny.build("flux")
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(pipe.vae.decode(latents)[0], twin.vae.decode(latents)[0])
        assert inside(pipe) == set()
        assert torch.equal(pipe.vae.decoder(latents), twin.vae.decoder(latents))
    assert inside(pipe) == {"vae"}, "who calls a submodule does not say when it is over"
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux")) and inside(pipe) == set()


# ---- weights outside of runs -----------------------------------------------------------------------------


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


# ---- on and off ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["flux", "wan22"])
def test_undo_leaves_no_trace(family: str, tmp_path: Path) -> None:
    pipe = tiny.build(family)
    tiny.run(pipe, family)
    before = snapshot_pipe(pipe)
    parameters = [id(p) for _, module in tiny.component_modules(pipe) for p in module.parameters()]
    accelerate(pipe, None, strict=True, offload="stage", offload_folder=str(tmp_path))
    assert any(tmp_path.iterdir())
    tiny.run(pipe, family)
    restore(pipe)
    assert not any(tmp_path.iterdir()), "the files are gone"
    assert_same(before, snapshot_pipe(pipe))
    assert parameters == [id(p) for _, module in tiny.component_modules(pipe) for p in module.parameters()]
    assert torch.equal(tiny.run(pipe, family), plain(family))


def test_twice_is_once(tmp_path: Path) -> None:
    """C32: the same again, other settings, another lever beside, off and on: each time a clean swap."""
    pipe = staged("flux", folder=str(tmp_path))
    for options in ({"offload": "stage"}, {"offload": "stage", "offload_keep": ("vae",)}, {"attention": "native"}):
        accelerate(pipe, None, strict=True, **options)
        assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))
    assert not any(tmp_path.iterdir())
    pipe.enable_stage_offload(folder=str(tmp_path))
    [folder] = tmp_path.iterdir()
    pipe.enable_first_block_cache(threshold=0.0, min_steps=0)
    assert [folder] == list(tmp_path.iterdir()), "another lever does not move weights anew"
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))
    pipe.disable_offload()
    assert not any(tmp_path.iterdir()) and torch.equal(tiny.run(pipe, "flux"), plain("flux"))


COMPANIONS: dict[str, dict[str, Any]] = {
    "cache": {"cache": "first_block", "cache_threshold": 0.3, "cache_min_steps": 0, "cache_last_steps": 0},
    "compile": {"compile": True, "compile_backend": "eager"},
    "tiles": {"vae_tiling": "blended"},
    "int8": {"quantization": "int8"},
    "guidance": {"guidance": "reuse", "guidance_min_steps": 0, "guidance_last_steps": 0},
}


@pytest.mark.parametrize("companion", COMPANIONS)
def test_beside_other_levers(companion: str) -> None:
    """The picture is that of the other lever alone, twice; a skipped call brings nothing in."""
    family = "wan" if companion == "guidance" else "flux"
    alone = accelerate(tiny.build(family), None, **COMPANIONS[companion])
    both = accelerate(tiny.build(family), None, offload="stage", **COMPANIONS[companion])
    assert {ITEM, *alone.acceleration.plan.enabled} == set(both.acceleration.plan.enabled)
    for _ in range(2):
        assert torch.equal(tiny.run(both, family), tiny.run(alone, family))
        assert both.acceleration.report.strip() == alone.acceleration.report.strip()
    restore(both)
    assert torch.equal(tiny.run(both, family), plain(family))


# ---- refusals --------------------------------------------------------------------------------------------


def reason(pipe: Any, **options: Any) -> str:
    """Why it does not act; nothing may have been touched, and strict must raise."""
    before = [p.data_ptr() for _, module in tiny.component_modules(pipe) for p in module.parameters()]
    item = plan(pipe, None, offload="stage", **options).item(ITEM)
    assert item.status != "enabled"
    with pytest.raises(DiffaccelError):
        accelerate(pipe, None, strict=True, offload="stage", **options)
    assert before == [p.data_ptr() for _, module in tiny.component_modules(pipe) for p in module.parameters()]
    return item.reason


def test_offload_of_others_is_left_alone() -> None:
    pipe = tiny.build("flux")
    pipe.enable_model_cpu_offload(device="cpu")
    assert "accelerate's offload" in reason(pipe)
    pipe = tiny.build("flux")
    cpu = torch.device("cpu")
    pipe.transformer.enable_group_offload(cpu, cpu, offload_type="block_level", num_blocks_per_group=1)
    assert "transformer" in reason(pipe) and "enable_group_offload" in reason(pipe)
    pipe = staged("flux")
    pipe.enable_model_cpu_offload(device="cpu")
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))
    assert any("stood down" in note for note in pipe.acceleration.report.notes), "switched on later: steps aside"


def test_a_shared_component() -> None:
    pipe, other = staged("flux"), tiny.build("flux")
    other.vae = pipe.vae
    assert "vae is shared" in reason(other)
    accelerate(other, None, strict=True, offload="stage", offload_keep=("vae",))
    for each in (other, pipe, other):
        assert torch.equal(tiny.run(each, "flux"), plain("flux"))


def test_places_that_would_not_do(tmp_path: Path) -> None:
    pipe = tiny.build("flux")
    assert "store='disk'" in reason(pipe, offload_store="host")
    file = tmp_path / "file"
    file.write_text("")
    assert "cannot be written to" in reason(pipe, offload_folder=str(file))
    assert "text_encoder_2" in reason(pipe, offload_keep=("txt",)), "says which components there are"
    if os.path.ismount("/dev/shm"):
        assert "in memory" in reason(pipe, offload_folder="/dev/shm")


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """Nothing lost, a clear error, no file left; and the pipeline can be accelerated afterwards."""
    pipe = tiny.build("flux")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # the text encoders fit, the transformer does not
    try:
        with pytest.raises(BudgetError, match=str(tmp_path)):
            accelerate(pipe, None, offload="stage", offload_folder=str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(tmp_path.iterdir()) and "_diffaccel" not in vars(pipe)
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("store", "dsk"), ("folder", 3), ("keep", "vae"), ("in_turn", 1.5), ("text_cache_bytes", -1), ("host_bytes", 0),
     ("device", "cdua"), ("text_cache_bytes", None), ("pin", "yes")],
)  # fmt: skip
def test_bad_values(name: str, value: Any) -> None:
    pipe = attach(tiny.build("flux"))
    with pytest.raises(InvalidOptionError, match=name):
        accelerate(pipe, None, offload="stage", **{f"offload_{name}": value})


# ---- budgets -----------------------------------------------------------------------------------------------

GIB = 1024**3


def gib(pipe: Any, *names: str) -> float:
    """Weights of these components."""
    return sum(weights(getattr(pipe, name)) for name in names) / GIB


def test_auto_takes_stages_where_weights_do_not_fit() -> None:
    pipe = tiny.build("flux")
    names = [name for name, _ in tiny.component_modules(pipe)]
    whole, least = gib(pipe, *names), gib(pipe, "transformer")
    assert plan(pipe, "auto", budget=Budget(memory_gib=whole * 1.01)).item(ITEM).status == "skipped"
    decided = plan(pipe, "auto", budget=Budget(memory_gib=least * 1.05))
    assert decided.item(ITEM).status == "enabled"
    assert decided.item(ITEM).predicted["weights_gib"] == pytest.approx(least, abs=1e-4)
    with pytest.raises(BudgetError, match=r"weights alone.*least possible.*denoise"):
        plan(pipe, "auto", budget=Budget(memory_gib=least * 0.9))
    with pytest.raises(BudgetError, match=r"offload='stage' would fit"):
        plan(pipe, None, budget=Budget(memory_gib=least * 1.05))
    with pytest.raises(BudgetError, match=r"offload.layerwise needs"):
        plan(pipe, None, budget=Budget(memory_gib=whole * 0.2), offload="layerwise", offload_store="disk")
    accelerate(pipe, "auto", budget=Budget(memory_gib=least * 1.05), cache=None)
    tiny.run(pipe, "flux")
    assert stats(pipe)["denoise_peak_bytes"] <= least * 1.05 * GIB
    pipe.enable_attention("native")
    assert ITEM in pipe.acceleration.plan.enabled, "the decision stays while other levers change"


def test_a_plan_is_a_file() -> None:
    """A plan with stages survives JSON and TOML, and puts them on again where it is given as the preset."""
    made = plan(tiny.build("flux"), None, offload="stage", offload_keep=("vae",), offload_in_turn=True)
    assert Plan.from_dict(json.loads(json.dumps(made.to_dict()))) == made == Plan.from_toml(made.to_toml())
    pipe = accelerate(tiny.build("flux"), made)
    assert pipe.acceleration.plan.item(ITEM).params == made.item(ITEM).params
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))


def test_a_tight_budget_makes_encoders_take_turns() -> None:
    pipe = tiny.build("sd3")
    pipe.transformer.transformer_blocks = torch.nn.ModuleList(list(pipe.transformer.transformer_blocks)[:1])
    encoders = [gib(pipe, name) for name in ("text_encoder", "text_encoder_2", "text_encoder_3")]
    limit = max(*encoders, gib(pipe, "transformer")) * 1.02
    assert limit < sum(encoders)
    decided = plan(pipe, None, budget=Budget(memory_gib=limit), offload="stage")
    assert "one at a time" in decided.item(ITEM).reason


def test_a_host_limit_refuses_with_numbers() -> None:
    pipe = tiny.build("flux")
    assert "least possible" in reason(pipe, offload_host_bytes=1000)
    with pytest.raises(IncompatibleError, match="no CUDA"):
        if torch.cuda.is_available():
            raise IncompatibleError("no CUDA is what this is about")
        accelerate(pipe, None, offload="stage", offload_device="cuda", strict=True)
    assert "host at most" in plan(pipe, None, offload="stage", offload_device="cuda").item(ITEM).reason
