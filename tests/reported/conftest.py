"""Each test starts and ends with the process-wide attention backend it found, on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    """Put back what the test's own set-up may move: the process-wide attention backend, threads, dynamo."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Backends

    backend, threads = Backends._active_backend, torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    Backends._active_backend = backend
