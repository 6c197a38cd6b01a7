"""LPIPS (Zhang et al. 2018): the distance of two pictures in the features of a trained AlexNet.

Needs the packages lpips and torchvision and AlexNet's weights on this machine. Nothing is downloaded: what is
missing is named instead.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidOptionError, MissingDependencyError
from .metrics import pair

MIN_SIDE = 31  # below, nothing is left for AlexNet's second pooling
_AT_ONCE = 16  # pictures per forward


def lpips(reference: Any, candidate: Any) -> float:
    """Learned perceptual distance (version 0.1 on AlexNet), averaged over the pictures; 0 if identical."""
    require()
    ours, theirs = pair(reference, candidate)
    height, width = ours.shape[-2:]
    if min(height, width) < MIN_SIDE:
        raise InvalidOptionError(
            f"lpips needs pictures of at least {MIN_SIDE}x{MIN_SIDE} pixels, got {width}x{height}; "
            "leave it out of metrics"
        )
    if ours.shape[1] not in (1, 3):
        raise InvalidOptionError(f"lpips compares grey or RGB pictures, got {ours.shape[1]} channels")
    network = _network().to(ours.device)
    total = 0.0
    with torch.no_grad():
        for one, other in zip(_chunks(ours), _chunks(theirs), strict=True):
            total += float(network(one, other, normalize=True).sum())  # normalize: 0..1 is taken to -1..1
    return total / len(ours)


def require() -> None:
    """Raise `MissingDependencyError` naming what lpips lacks on this machine; no model is loaded."""
    for package in ("lpips", "torchvision"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"the metric lpips needs the package {package}, which is not installed: pip install lpips torchvision"
            )
    weights = _weights()
    if not weights.is_file():
        raise MissingDependencyError(
            f"the metric lpips needs AlexNet's weights {weights.name}, which are not in {weights.parent} (diffaccel "
            "downloads nothing); fetch them once, where there is a network, with: "
            "python -c \"import lpips; lpips.LPIPS(net='alex')\""
        )


def available() -> bool:
    """Does this machine have what lpips needs?"""
    try:
        require()
    except MissingDependencyError:
        return False
    return True


def _weights() -> Path:
    """Where torchvision keeps the weights that lpips asks it for."""
    try:
        models = importlib.import_module("torchvision.models")
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch
        raise MissingDependencyError(
            f"the metric lpips needs torchvision, which is installed but cannot be imported ({error}): "
            "pip install the torchvision made for this torch"
        ) from error
    name: str = models.AlexNet_Weights.IMAGENET1K_V1.url.rsplit("/", 1)[-1]
    folder: str = torch.hub.get_dir()
    return Path(folder) / "checkpoints" / name


@functools.lru_cache(maxsize=1)  # 10 MB; a sweep asks for it hundreds of times
def _network() -> Any:
    return importlib.import_module("lpips").LPIPS(net="alex", verbose=False).eval()


def _chunks(pictures: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """float32 [<= 16, 3, H, W] each."""
    count, _, height, width = pictures.shape
    parts: tuple[torch.Tensor, ...] = pictures.float().expand(count, 3, height, width).split(_AT_ONCE)
    return parts
