"""The private names we lean on are still there, and a missing one would be noticed."""

from __future__ import annotations

import pytest
from diffusers.hooks.hooks import HookRegistry

from diffaccel.core import compat


def test_no_drift() -> None:
    assert compat.drift() == []


def test_drift_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.delattr(HookRegistry, "invalidate_child_registries_cache")
    assert compat.drift() == ["HookRegistry.invalidate_child_registries_cache"]
