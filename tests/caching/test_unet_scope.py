"""The scope of DeepCache: a U-Net's shallow part on the true deep feature is the whole U-Net, bit for bit."""

from __future__ import annotations

import pytest
import torch

from diffaccel.caching.scopes.unet import branches_of
from diffaccel.extrapolation.forecast import Forecast
from diffaccel.models.cards.sdxl import CARD, PARTS
from tests import tiny
from tests.caching.unets import FREEU, ByHand, Driven, calls_of, computed, deep, inputs_of, pipeline, unet_of


@pytest.mark.parametrize("interval", [2, 3])
@pytest.mark.parametrize(
    ("kind", "branch"), [("tiny", b) for b in range(4)] + [("sdxl", b) for b in (0, 1, 2, 3, 5, 8)]
)
def test_the_picture_of_one_written_by_hand(kind: str, branch: int, interval: int) -> None:
    """Ten steps of a pipeline with guidance in one batch: bit-equal to the by-hand truncated U-Net."""
    pipe = pipeline(kind)
    pipe.unet.forward = ByHand(pipe.unet, interval, branch)
    expected = tiny.run(pipe, "sdxl", num_inference_steps=10)
    ours = deep(kind, cache_interval=interval, cache_branch=branch)
    assert torch.equal(tiny.run(ours, "sdxl", num_inference_steps=10), expected)
    assert computed(ours) == list(range(0, 10, interval))
    assert {step.branch for step in ours.acceleration.report.steps} == {"cond_uncond"}


def test_the_by_hand_forward_is_the_unet() -> None:
    """At interval 1 it gives the plain picture, and another branch, or a longer interval, another picture."""
    pipe = pipeline("sdxl")
    pipe.unet.forward = ByHand(pipe.unet, 1, 0)
    plain = tiny.run(pipeline("sdxl"), "sdxl")
    assert torch.equal(tiny.run(pipe, "sdxl"), plain)
    pictures = [plain] + [tiny.run(deep("sdxl", cache_branch=b), "sdxl") for b in range(9)]
    pictures.append(tiny.run(deep("sdxl", cache_interval=2), "sdxl"))
    assert len({picture.numpy().tobytes() for picture in pictures}) == len(pictures)


@pytest.mark.parametrize("size", [(8, 8), (10, 14)])
@pytest.mark.parametrize(("kind", "count"), [("tiny", 4), ("sdxl", 9), ("sd15", 12)])
def test_the_true_deep_feature_gives_the_full_unet(kind: str, count: int, size: tuple[int, int]) -> None:
    """Same inputs again, forced to be a hit: the same bits, of every branch, also where sizes do not halve evenly."""
    unet = unet_of(kind)
    assert branches_of(unet, PARTS) == count
    call = inputs_of(unet, size)
    with torch.no_grad():
        plain = unet(*call[0], **call[1], return_dict=False)[0]
    for branch in range(count):
        driven = Driven(unet, branch, "1011")
        with calls_of(unet) as full:
            assert torch.equal(driven.call(*call), plain)
        with calls_of(unet) as shallow:
            assert torch.equal(driven.call(*call), plain)
        assert [made.computed for made in driven.run.calls] == [True, False]
        assert len(shallow) < len(full) and set(shallow) < set(full)
        other = inputs_of(unet, size, seed=1)
        with torch.no_grad():
            driven.undo()
            assert torch.equal(unet(*call[0], **call[1], return_dict=False)[0], plain)
            assert not torch.equal(unet(*other[0], **other[1], return_dict=False)[0], plain)


def test_what_a_reused_step_runs() -> None:
    """Branch 0 the entry layer and the last layer of the up path; every branch more than the one before."""
    unet, counts = unet_of("sdxl"), []
    for branch in range(9):
        driven = Driven(unet, branch, "10")
        driven.call(*inputs_of(unet))
        with calls_of(unet) as names:
            driven.call(*inputs_of(unet))
        driven.undo()
        counts.append(len(names))
        down = {".".join(name.split(".")[:4]) for name in names if name.startswith("down_blocks")}
        assert not any(name.startswith("mid_block") for name in names)
        if branch == 0:
            assert not down and {n.split(".")[0] for n in names} >= {"conv_in", "up_blocks", "conv_out"}
            assert all(n.startswith("up_blocks.2.resnets.2") for n in names if n.startswith("up_blocks"))
        if branch == 3:  # a whole block of the down path, as in the package: its two layers and its downsampler
            assert {name.rsplit(".", 1)[0] for name in down} == {"down_blocks.0.resnets", "down_blocks.0.downsamplers"}
    assert counts == sorted(set(counts))


def test_a_wrong_feature_shows() -> None:
    """Negative control: the deep feature of another branch, or of another step, gives another output."""
    unet, call = unet_of("sdxl"), inputs_of(unet_of("sdxl"))
    with torch.no_grad():
        plain = unet(*call[0], **call[1], return_dict=False)[0]
    features = []
    for branch in (0, 1):
        driven = Driven(unet, branch, "10")
        driven.call(*call)
        (state,) = driven.run.state["deep"].values()
        features.append(state.memory.history[-1].values[0])
        driven.undo()
    assert features[0].shape == features[1].shape and not torch.equal(*features)
    for feature, right in ((features[0], True), (features[1], False)):
        driven = Driven(unet, 0, "10")
        driven.call(*call)
        (state,) = driven.run.state["deep"].values()
        sample = state.memory.history[-1]
        state.memory = state.memory._replace(history=(sample._replace(values=(feature,)),))
        assert torch.equal(driven.call(*call), plain) is right
        driven.undo()
    driven = Driven(unet, 0, "10")
    driven.call(*inputs_of(unet, seed=1))
    assert not torch.equal(driven.call(*call), plain)


@pytest.mark.parametrize("branch", range(9))
def test_freeu_is_left_alone(branch: int) -> None:
    """FreeU writes into what enters a layer: not into what is remembered, at two hits in a row."""
    unet, call = unet_of("sdxl"), inputs_of(unet_of("sdxl"))
    with torch.no_grad():
        without = unet(*call[0], **call[1], return_dict=False)[0]
        unet.enable_freeu(**FREEU)
        plain = unet(*call[0], **call[1], return_dict=False)[0]
    assert not torch.equal(plain, without)
    driven = Driven(unet, branch, "100")
    assert all(torch.equal(driven.call(*call), plain) for _ in range(3))


def test_ip_adapter() -> None:
    """Its image tokens reach the layers that run: the same bits with them, other bits with another image."""
    unet = unet_of("sd15")
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    widths = [unet.get_submodule(key.removesuffix(".processor")).to_k.out_features for key in unet.attn_processors]
    crosses = [i for i, key in enumerate(unet.attn_processors) if "attn2" in key]
    weights = {f"{i}.to_{kind}_ip.weight": draw(widths[i], 64) for i in crosses for kind in "kv"}
    norm = {"norm.weight": draw(64), "norm.bias": draw(64)}
    projection = {"proj.weight": draw(4 * 64, 32), "proj.bias": draw(4 * 64), **norm}
    unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": weights}])
    args, _ = inputs_of(unet)
    first, second = ({"added_cond_kwargs": {"image_embeds": [draw(2, 1, 32)]}} for _ in range(2))
    with torch.no_grad():
        plain = unet(*args, **first, return_dict=False)[0]
    driven = Driven(unet, 2, "100")
    assert torch.equal(driven.call(args, first), plain) and torch.equal(driven.call(args, first), plain)
    assert not torch.equal(driven.call(args, second), plain)


@pytest.mark.parametrize("float32", [False, True])
def test_forecast_of_the_deep_feature(float32: bool) -> None:
    """At order 1 the feature goes on in a straight line, in the model's own dtype."""
    unet = unet_of("sdxl").to(torch.bfloat16)
    driven = Driven(unet, 0, "1110", Forecast(1), float32=float32)
    calls = [
        tuple(
            tuple(x.to(torch.bfloat16) if x.is_floating_point() else x for x in args)
            if isinstance(args, tuple)
            else {"added_cond_kwargs": {k: x.to(torch.bfloat16) for k, x in args["added_cond_kwargs"].items()}}
            for args in inputs_of(unet, seed=seed)
        )
        for seed in range(4)
    ]
    for call in calls[:3]:
        driven.call(*call)
    (state,) = driven.run.state["deep"].values()
    old, new = (sample.values[0] for sample in state.memory.history)
    assert old.dtype == (torch.float32 if float32 else torch.bfloat16)
    entering: list[torch.Tensor] = []
    unet.up_blocks[2].resnets[2].register_forward_pre_hook(lambda module, args: entering.append(args[0]))
    assert driven.call(*calls[3]).dtype == torch.bfloat16
    feature = entering[0][:, :8]
    assert feature.dtype == torch.bfloat16
    torch.testing.assert_close(feature, (2 * new - old).to(torch.bfloat16), atol=0.05, rtol=0.05)
    assert not torch.equal(feature, new.to(torch.bfloat16))


def test_a_unet_without_a_middle() -> None:
    """Its deepest branch has nothing below it; the others work."""
    unet = unet_of("sdxl")
    unet.mid_block = None
    call = inputs_of(unet)
    with torch.no_grad():
        plain = unet(*call[0], **call[1], return_dict=False)[0]
    driven = Driven(unet, 7, "10")
    assert torch.equal(driven.call(*call), plain) and torch.equal(driven.call(*call), plain)
    driven.undo()


def test_the_card_names_parts_that_are_there() -> None:
    """Data that drifts from diffusers is found here."""
    unet = unet_of("sdxl")
    assert CARD.unet is PARTS
    for name in (PARTS.down, PARTS.middle, PARTS.up):
        assert hasattr(unet, name)
    assert hasattr(unet.down_blocks[0], PARTS.samplers)
    assert all(hasattr(unet.up_blocks[0], name) for name in PARTS.layers)
