"""The same process state around each test as in tests/invariants."""

from __future__ import annotations

from tests.invariants.conftest import process_state

__all__ = ["process_state"]
