"""One of several processes that hold the shards of a model: python -m tests.loaded.fsdp_worker RANK WORLD STORE KIND.

KIND is 1 (`FullyShardedDataParallel`) or 2 (`fully_shard`). Prints one JSON line: what a cache did on the shards, and
what it did on the whole model in this process.
"""

from __future__ import annotations

import hashlib
import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from diffaccel import accelerate, restore
from tests import tiny
from tests.loaded.wrapped import sharded_in_place, sharded_whole

SCHEDULE: dict[str, Any] = {"cache": "schedule", "cache_steps": [0, 1, 3], "cache_min_steps": 0}
ADAPTIVE: dict[str, Any] = {"cache": "easycache", "cache_threshold": 0.2, "cache_warmup_steps": 0}
BLOCKS: dict[str, Any] = {"cache": "first_block", "cache_threshold": 1e9}


def picture(pipe: Any, rank: int) -> torch.Tensor:
    """Each process makes a picture of its own."""
    return tiny.run(pipe, "flux", prompt=tiny.PROMPTS[rank], generator=torch.Generator().manual_seed(rank))


def bits(pipe: Any) -> list[str]:
    """Of this process's part of each parameter."""
    own = (getattr(one, "_local_tensor", one).detach() for one in pipe.transformer.parameters())
    return [hashlib.sha256(one.contiguous().numpy().tobytes()).hexdigest() for one in own]


def cached(pipe: Any, rank: int, **wishes: Any) -> tuple[torch.Tensor, str]:
    """(picture, computed and reused steps) under a cache, which is taken off again."""
    accelerate(
        pipe, None, strict=True, cache_min_steps=0, **{k: v for k, v in wishes.items() if k != "cache_min_steps"}
    )
    made = picture(pipe, rank)
    strip = "".join(pipe.acceleration.report.strip().values())
    restore(pipe)
    return made, strip


def main(rank: int, world: int, store: str, kind: int) -> None:
    """Whole, then in shards."""
    whole = tiny.build("flux")
    truth = picture(whole, rank)
    wishes = {"schedule": SCHEDULE, "easycache": ADAPTIVE, "first_block": BLOCKS}
    alone = {name: cached(whole, rank, **one) for name, one in wishes.items()}
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=240)
    )
    pipe = (sharded_whole, sharded_in_place)[kind - 1](tiny.build("flux"))
    plain, before, form = picture(pipe, rank), bits(pipe), type(pipe.transformer).__mro__
    together = {name: cached(pipe, rank, **one) for name, one in wishes.items()}
    after, undone = bits(pipe), picture(pipe, rank)
    found = {
        "parts": sum(getattr(one, "_local_tensor", one).numel() for one in pipe.transformer.parameters()),
        "whole": sum(one.numel() for one in whole.transformer.parameters()),
        "plain": torch.equal(plain, truth),
        "schedule": torch.equal(together["schedule"][0], alone["schedule"][0]),
        "undone": torch.equal(undone, plain) and after == before and type(pipe.transformer).__mro__ == form,
        "alone": {name: strip for name, (_, strip) in alone.items()},
        "together": {name: strip for name, (_, strip) in together.items()},
    }
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
