"""The benchmark scripts count and judge rightly; invariant 9 (overhead) is checked with one of them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.demo_bench import AIM, _met
from benchmarks.overhead import CallCounter, SyncCounter, measure


@pytest.fixture(scope="module")
def counts():
    return measure()


def test_a_missed_step_costs_few_calls_and_one_sync(counts):
    more = counts["missed_minus_plain"]
    assert 0 < more["calls_step"] <= 28 + 4 * counts["blocks"]
    assert more["syncs_step"] == 1
    assert counts["within_limits"]


def test_every_compared_step_synchronises_once_and_a_plain_one_never(counts):
    assert counts["plain"]["syncs_step"] == [0]
    assert counts["missed"]["syncs_step"] == counts["hit"]["syncs_step"] == [1]


def test_a_hit_step_skips_most_of_the_work(counts):
    assert counts["hit"]["calls_forward"] < counts["plain"]["calls_forward"] / 2


class Denoiser(torch.nn.Module):
    """Makes a known number of Python calls and host syncs."""

    def forward(self, x):
        for _ in range(3):
            helper()
        return x * float(x.sum()) if x.sum() > 0 else x


def helper():
    return None


def test_the_counters_count_what_a_module_does():
    import sys

    module, x = Denoiser(), torch.ones(2)
    calls = CallCounter(module)
    sys.setprofile(calls)
    try:
        module(x)
        helper()
        module(x)
    finally:
        sys.setprofile(None)
    assert calls.forward == [5, 5]  # _call_impl, forward, 3 helpers
    assert calls.step == [6, 5]

    syncs = SyncCounter()
    with syncs.watching(module):
        module(x)
        x.sum().item()
        module(-x)
    assert syncs.forward == [2, 1] and syncs.step == [3, 1]
    assert not module._forward_hooks and not module._forward_pre_hooks


@pytest.mark.parametrize(
    ("speedup", "psnr", "identical", "met"),
    [(1.5, 30.0, False, True), (1.3, 30.0, False, False), (1.5, 27.0, False, False), (1.5, None, True, True)],
)
def test_the_aim_needs_both_speed_and_fidelity(speedup, psnr, identical, met):
    plain = {"name": "plain", "speedup": 1, "psnr": None}
    run = {"name": AIM["run"], "speedup": speedup, "psnr": psnr, "identical": identical}
    assert _met([plain, run]) is met
    assert _met([plain]) is None
