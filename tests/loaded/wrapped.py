"""Rows of docs/loading.md: denoisers that are wrapped or compiled, and pipelines under hooks of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests import tiny
from tests.loaded.row import LIBRARY, WARNS, Row, Says

CPU = torch.device("cpu")


class Forwarding(torch.nn.DataParallel):
    """As pipelines need it: without the model's attributes (`config`, `dtype`), no call of diffusers gets through."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def peft(pipe: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
        pipe.transformer = get_peft_model(pipe.transformer, config)
    return pipe


def parallel(pipe: Any) -> Any:
    pipe.transformer = Forwarding(pipe.transformer)
    return pipe


def _group() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def sharded_whole(pipe: Any) -> Any:
    """FSDP 1, block by block and as a whole; over all processes of the group."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    _group()
    model = pipe.transformer
    kinds = {type(model.transformer_blocks[0]), type(model.single_transformer_blocks[0])}
    pipe.transformer = FullyShardedDataParallel(model, device_id=CPU, auto_wrap_policy=ModuleWrapPolicy(kinds))
    return pipe


def sharded_in_place(pipe: Any) -> Any:
    """FSDP 2, block by block and as a whole; over all processes of the group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _group()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(pipe.transformer, mesh=mesh)
    return pipe


def compiled(pipe: Any) -> Any:
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    return pipe


def adapter(pipe: Any) -> Any:
    from peft import LoraConfig

    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    return pipe


def compiled_in_place(pipe: Any) -> Any:
    pipe.transformer.compile(backend="eager")
    return pipe


def repeated(pipe: Any) -> Any:
    pipe.transformer.compile_repeated_blocks(backend="eager")
    return pipe


def compiled_blocks(pipe: Any) -> Any:
    for blocks in (pipe.transformer.transformer_blocks, pipe.transformer.single_transformer_blocks):
        for index, block in enumerate(blocks):
            blocks[index] = torch.compile(block, backend="eager")
    return pipe


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "`get_peft_model`": peft,
    "`DataParallel`": parallel,
    "`FullyShardedDataParallel`": sharded_whole,
    "`fully_shard`": sharded_in_place,
    "`torch.compile(transformer)`": compiled,
}


def of(wrap: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: wrap(tiny.build("flux"))


SHARDED = {
    **dict.fromkeys(("fp8", "int8", "svdquant"), Says("is cut into shards by FSDP: quantize the plain model")),
    "compile": Says("is cut into shards by FSDP"),
    "layerwise": Says("FSDP (whose shards are gathered for each call), on transformer, moves the same weights"),
    "stage": Says("is moved by FSDP (whose shards are gathered for each call)"),
}
WHOLE = {
    "compile": Says("is compiled as a whole already (torch.compile)"),
    "layerwise": Says("is compiled as a whole (torch.compile): its weights are read inside of one graph"),
}
REPLACED = {
    name: Says(f"{item} is off now, as a denoiser was replaced: transformer is compiled as a whole", WARNS)
    for name, item in (("compile", "compile"), ("layerwise", "offload.layerwise"))
}
BLOCKS = {"compile": Says("blocks are compiled already (not by diffaccel), and stay so")}
PROCESS = (
    "one process, so that no shard lies elsewhere. With two (`tests/loaded/test_fsdp.py`) a cache of the whole output "
    "makes the same bits as on the plain model, members decide alike, and undo is bit-exact."
)
ROWS = (
    Row("`transformer.add_adapter`", of(adapter), {"lora": Says("has LoRAs that were loaded by diffusers")}),
    Row("`get_peft_model`", of(peft), {"lora": Says("is wrapped by peft (get_peft_model)")}),
    Row("`DataParallel`, one device", of(parallel)),
    Row("FSDP 1, `FullyShardedDataParallel`", of(sharded_whole),
        {**SHARDED, "lora": Says("is cut into shards by FSDP (FullyShardedDataParallel)")}, remark=PROCESS),
    Row("FSDP 2, `fully_shard`", of(sharded_in_place),
        {**SHARDED, "save": Says("Trying to resize storage that is not resizable", LIBRARY)},
        remark=PROCESS),
)  # fmt: skip
COMPILED = (
    Row("`torch.compile(transformer)`", of(compiled), WHOLE),
    Row("`transformer.compile()`", of(compiled_in_place), WHOLE),
    Row("`compile_repeated_blocks()`", of(repeated), BLOCKS),
    Row("`torch.compile` of each block", of(compiled_blocks), BLOCKS),
    Row("`torch.compile(transformer)`, after", lambda: tiny.build("flux"), REPLACED, after=compiled),
    Row("`transformer.compile()`, after", lambda: tiny.build("flux"), after=compiled_in_place),
    Row("`compile_repeated_blocks()`, after", lambda: tiny.build("flux"), after=repeated),
)  # fmt: skip
