"""The metric lpips: what it hands to the package, and what is said where package or weights are missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diffaccel.errors import InvalidOptionError, MissingDependencyError
from diffaccel.quality import compare, lpips, mse, perceptual

WEIGHTS = "alexnet-0000.pth"
STAND_IN = """
import torch

calls = []

class LPIPS(torch.nn.Module):
    '''Mean absolute difference of each picture after normalization, [N, 1, 1, 1].'''

    def __init__(self, net, verbose):
        super().__init__()
        assert net == "alex" and not verbose

    def forward(self, one, other, normalize=False):
        calls.append(tuple(one.shape))
        assert not self.training and not torch.is_grad_enabled() and one.dtype == other.dtype == torch.float32
        if normalize:
            one, other = 2 * one - 1, 2 * other - 1
        return (one - other).abs().mean(dim=(1, 2, 3), keepdim=True)
"""
TORCHVISION = f"""
class AlexNet_Weights:
    class IMAGENET1K_V1:
        url = "https://nowhere.invalid/models/{WEIGHTS}"
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand-ins for lpips and torchvision, and a torch hub folder with the weights' file; the file's path."""
    names = ("lpips", "torchvision", "torchvision.models")
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("lpips", "torchvision")}
    for name in kept:
        monkeypatch.delitem(sys.modules, name)
    for name, text in zip(names, (STAND_IN, "", TORCHVISION), strict=True):
        target = tmp_path / "packages" / name.replace(".", "/") / "__init__.py"
        target.parent.mkdir(parents=True)
        target.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    weights = tmp_path / "hub" / "checkpoints" / WEIGHTS
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"")
    perceptual._network.cache_clear()
    yield weights
    perceptual._network.cache_clear()
    for name in names:
        sys.modules.pop(name, None)


def test_values_are_handed_over_as_minus_one_to_one(packages: Path) -> None:
    """Against the stand-in, whose answer is known: twice the mean difference, averaged over all pictures."""
    zero = torch.zeros(3, 3, 32, 40, dtype=torch.float64)
    moved = zero + torch.tensor([0.1, 0.2, 0.6])[:, None, None, None]
    assert lpips(zero, zero) == 0
    assert lpips(zero, moved) == pytest.approx(2 * 0.3)
    assert lpips(zero[:, :1], moved[:, :1]) == pytest.approx(2 * 0.3)  # grey
    scores = compare(zero, moved, metrics=("lpips", "mse"))
    assert scores == {"lpips": pytest.approx(2 * 0.3), "mse": mse(zero, moved)}
    assert type(scores["lpips"]) is float


def test_many_pictures_go_in_parts(packages: Path) -> None:
    ours = torch.zeros(2, 9, 3, 32, 32)
    theirs = ours.clone()
    theirs[1, 8] += 0.9
    assert lpips(ours, theirs) == pytest.approx(2 * 0.9 / 18)
    assert importlib.import_module("lpips").calls == [(16, 3, 32, 32), (2, 3, 32, 32)]


def test_pictures_it_cannot_take(packages: Path) -> None:
    with pytest.raises(InvalidOptionError, match="40x30"):
        lpips(torch.zeros(1, 3, 30, 40), torch.zeros(1, 3, 30, 40))
    with pytest.raises(InvalidOptionError, match="16 channels"):
        lpips(torch.zeros(1, 16, 32, 40), torch.zeros(1, 16, 32, 40))


def test_missing_weights_are_named_and_not_fetched(packages: Path) -> None:
    packages.unlink()
    for metrics in ("lpips", ("psnr", "lpips")):
        with pytest.raises(MissingDependencyError, match=rf"{WEIGHTS}.*{packages.parent}.*nothing.*import lpips"):
            compare("read later", "and so never", metrics=metrics)
    assert not packages.exists() and "lpips" not in sys.modules


@pytest.mark.parametrize("package", ["lpips", "torchvision"])
def test_a_missing_package_is_named(package: str, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    with pytest.raises(MissingDependencyError, match=f"package {package},.*pip install lpips"):
        compare("read later", "and so never", metrics=("lpips",))
    with pytest.raises(ImportError):
        lpips(torch.zeros(1, 3, 32, 32), torch.zeros(1, 3, 32, 32))


def test_a_package_that_cannot_be_imported_is_named(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def broken(name: str) -> object:
        if name == "torchvision.models":
            raise RuntimeError("operator torchvision::nms does not exist")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(MissingDependencyError, match=r"torchvision.*nms does not exist.*pip install"):
        compare("read later", "and so never", metrics=("lpips",))


def test_the_real_lpips() -> None:
    """Where package and weights are here: 0 for identical pictures, and more for a stronger change."""
    try:
        perceptual.require()
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    perceptual._network.cache_clear()
    ours = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    little, much = (lpips(ours, (ours + strength * noise).clamp(0, 1)) for strength in (0.02, 0.3))
    assert lpips(ours, ours) == pytest.approx(0, abs=1e-6)
    assert 0 < little < much
