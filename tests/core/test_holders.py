"""Who holds a module: one at a time, and neither is kept alive."""

from __future__ import annotations

import gc

import torch

from diffaccel.core.holders import Holders


class Owner:
    """Somebody."""


def test_one_holder_at_a_time_and_neither_is_kept_alive() -> None:
    holders: Holders[Owner] = Holders()
    module, first, second = torch.nn.Linear(1, 1), Owner(), Owner()
    assert holders.of(module) is None
    holders.take(module, first)
    assert holders.of(module) is first
    holders.take(module, second)
    del first
    assert holders.of(module) is second
    del second
    gc.collect()
    assert holders.of(module) is None, "a holder that is gone holds nothing"
    holders.release(module)
    holders.release(module)  # nothing to do
    kept = len(holders._rows)
    del module
    gc.collect()
    assert kept == len(holders._rows) == 0
