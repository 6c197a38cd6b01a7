"""Settings for all tests: nothing is ever downloaded, and libraries keep their hints to themselves."""

import os
import re
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

# Cases of families and levers that take seconds and have found nothing that their neighbours did not find: left to
# `make test-all`. What each test is about runs on at least one other family or lever in `make test`.
SLOW = re.compile(
    r"test_weights_memory_attention\.py::test_(a_run_that_was_given_up|the_picture).*\[(sd3|wan) stack"
    r"|test_weights_memory_attention\.py::.*(\[vae video|test_whatever_came_before\[flux stack-another)"
    r"|test_neighbours_order_and_chain\.py::.*(\[vae video|\[sparse-|test_skipped.*\[sd3)"
    r"|test_foreign_hooks\.py::test_a_compiled_model.*\[(svdquant|fp8)"
    r"|test_around\.py::test_nothing_is_compiled_twice\[(?!first_block|teacache|schedule)"
    r"|test_8_chain\.py::test_compiled\[(wan-wrapped|flux-wrapped)"
    r"|test_stage_text_adapters\.py::test_later_processes.*\[(sdxl|sd3)"
    r"|reported/test_every_cache\.py::.*(dicache|delta_dit|seacache|magcache)"
    r"|lora/test_files\.py::.*\[(sdxl: (?!kohya)|ltx2|hunyuan_video: peft, biases)"
    r"|test_one_lever\.py::test_one_verb.*-svdquant"
    r"|test_foreign_hooks\.py::test_layerwise_casting_over_compiled_blocks\[(svdquant|fp8)"
    r"|test_foreign_hooks\.py::.*(sd3|sdxl|wan)"
    r"|test_one_lever\.py::test_a_pair.*(svdquant|exact VAE)"
    r"|test_8_chain\.py::test_offload.*\[wan"
    r"|test_neighbours_order_and_chain\.py::test_verbs_in_any_order.*\[sd3"
    r"|test_neighbours_order_and_chain\.py::test_offload.*\[(svdquant|fp8|sage)"
    r"|lora/test_verbs\.py::.*sdxl"
    r"|test_regional\.py::test_(dynamic_sizes.*True|blocks_are_whole.*wan|with_an_attention)"
    r"|test_choice\.py::test_calls_in_compiled.*\[(sd3|wan-aot)"
    r"|invariants/test_(1_undo|3_isolation)\.py::.*sd3"
    r"|test_unet_scope\.py::.*size1"
    r"|invariants/test_every_cache\.py::.*(sd3|seacache|taylorseer lite|dicache|delta_dit)"
    r"|test_exact_causal\.py::.*(-2|-3|wan22|qwen|hunyuan15|bfloat16|trained_one)"
    r"|tune/test_search\.py::test_(an_interrupt_leaves|no_run_begins)"
    r"|lora/test_manager\.py::test_every_order.*(fp8|int8|flux-svdquant)"
)


@pytest.hookimpl(tryfirst=True)  # before the selection by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the pattern above names."""
    for item in items:
        if SLOW.search(item.nodeid):
            item.add_marker(pytest.mark.slow)


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
