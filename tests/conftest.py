"""Settings for all tests: nothing is ever downloaded, and libraries keep their hints to themselves."""

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from diffusers.hooks.group_offloading import ModuleGroup

# One thread: sums split over threads are not bit-equal from run to run, and many tests compare bits; on tiny models
# it is faster, too. Before any test imports torch.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # before any test imports huggingface_hub
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tests start subprocesses


@pytest.fixture
def onloads(monkeypatch: pytest.MonkeyPatch) -> "list[ModuleGroup]":
    """Every group that diffusers' group offload brings in, in order."""
    from diffusers.hooks.group_offloading import ModuleGroup

    seen: list[ModuleGroup] = []
    original = ModuleGroup.onload_

    def onload_(self: ModuleGroup, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ModuleGroup, "onload_", onload_)
    return seen
