"""A layerwise offload at work on one pipeline: what is stored, what is hooked, and how all of it comes back."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING, Any

import torch

from ...core.accelerator import Site, Target
from ...core.chain import Hook, Link, RootHook, install
from ...core.compat import eager, host_edit, unwrap_module
from ...core.run import Call, Run
from ...errors import IncompatibleError
from ..packing import own_tensors, pack, plain_tensors, tensors_of
from ..store import DiskStore, HostStore, Store, StoredTensors
from ..transfer import CudaTransfer, ThreadTransfer, TransferStream
from .blocks import HOOK, BlockTable, find_blocks, other_offload, shared_of
from .partition import Partition
from .prefetch import Block, Prefetcher, TransferCounts

if TYPE_CHECKING:
    from .config import LayerwiseOffload

NAMES = ("blocks_moved", "bytes_moved", "wait_s", "read_s")


def give_to_system() -> None:
    """Hand memory that was freed back to the system, where the C library keeps it for later (glibc does)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


class _Turn(Hook):
    """Around a block that takes turns."""

    def __init__(self, conveyor: Prefetcher, block: Block) -> None:
        super().__init__()
        self.conveyor, self.block = conveyor, block

    @eager
    def call(self, ref: Any, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, with its weights in place."""
        try:
            self.conveyor.enter(self.block)
            return ref.body(*args, **kwargs)
        finally:
            self.conveyor.leave(self.block)


class _Stay(Hook):
    """On a block that stays: others can be fetched while it computes."""

    def __init__(self, conveyor: Prefetcher, index: int, component: str) -> None:
        super().__init__()
        self.conveyor, self.index, self.component = conveyor, index, component

    @eager
    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.conveyor.kept_runs(self.index, self.component)
        return args, kwargs


class _Ear:
    """Listens to a denoiser's calls."""

    def __init__(self, conveyor: Prefetcher, root: RootHook) -> None:
        self.conveyor, self.root = conveyor, root

    def begin_call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The denoiser is about to run."""
        self.conveyor.begin(call, self.root.listeners)

    def end_call(self, call: Call) -> None:
        """It returned or raised."""
        self.conveyor.end(call)


class LayerwiseAttached:
    """The edit: `attach`, then runs, then `undo`."""

    def __init__(self, lever: LayerwiseOffload, target: Target, site: Site, device: torch.device) -> None:
        self.lever, self.target, self.site, self.device = lever, target, site, device
        self.links: list[Link] = []
        self.ears: list[_Ear] = []
        self.moved_home: list[tuple[torch.Tensor, torch.device]] = []
        self.store: Store | None = None
        self.blocks: list[Block] = []
        self.conveyor: Prefetcher

    # ---- on and off ----------------------------------------------------------------------------------------

    @host_edit
    def attach(self) -> None:
        """Store, park, hook. Raises with all as it was."""
        seen = find_blocks(self.target)
        split = self.lever.divide(seen)
        self.shared = set(seen.shared)
        disk = self.lever.store == "disk"
        pin = self.lever.pin if self.lever.pin is not None else self.device.type == "cuda"
        self.store = DiskStore(self.lever.folder) if disk else HostStore(pin)
        try:
            for index in split.moving:
                block = self._block(seen, index)
                self.blocks.append(block)
                block.boxes.append(self._put(block, tensors_of(unwrap_module(block.module))))
                if not disk:  # else the host would hold all weights twice
                    block.park()
            for block in self.blocks:  # a disk that fills up has cost nothing so far
                block.park()
            self._go_to_device(seen, split)
            self._hook(seen, split)
            give_to_system()
        except BaseException:
            self.undo()
            raise

    def _block(self, seen: BlockTable, index: int) -> Block:
        component = seen.components[index]
        block, row = seen.blocks[index]
        label = f"{component}.{row.attribute}.{list(getattr(self._denoiser(component), row.attribute)).index(block)}"
        return Block(index, label, component, block)

    def _denoiser(self, component: str) -> torch.nn.Module:
        module: torch.nn.Module = unwrap_module(getattr(self.target.pipe, component))
        return module

    def _put(self, block: Block, tensors: list[tuple[str, torch.Tensor]]) -> StoredTensors:
        assert self.store is not None
        home = block.boxes[0].layout[0][2] if block.boxes else None
        return self.store.put(pack(((n, t) for n, t in tensors if id(t) not in self.shared), home), block.label)

    def _go_to_device(self, seen: BlockTable, split: Partition) -> None:
        """All that does not take turns goes where the blocks compute, where that is asked for."""
        if self.lever.device is None:
            return
        moving = {id(t) for index in split.moving for _, t in tensors_of(unwrap_module(seen.blocks[index][0]))}
        for component in self.target.pipe.components.values():
            for child in component.modules() if isinstance(component, torch.nn.Module) else ():
                for name, tensor in own_tensors(child):
                    for _, inner in plain_tensors(name, tensor):
                        if inner.device != self.device and (id(inner) not in moving or id(inner) in self.shared):
                            self.moved_home.append((inner, inner.device))
                            inner.data = inner.data.to(self.device)

    def _hook(self, seen: BlockTable, split: Partition) -> None:
        kept_bytes = sum(seen.sizes[i] for i in split.kept) + seen.shared_bytes
        kept = (len(split.kept), kept_bytes)
        self.conveyor = Prefetcher(self.blocks, kept, self.lever.prefetch, self.device, self._lane, self.renew)
        for block in self.blocks:
            hook = _Turn(self.conveyor, block)
            block.link = install(block.module, hook, HOOK).around(hook.call)
            self.links.append(block.link)
        for index in split.kept:
            module, component = seen.blocks[index][0], seen.components[index]
            self.links.append(install(module, _Stay(self.conveyor, index, component), HOOK))
        for root in self.site.roots.values():
            ear = _Ear(self.conveyor, root)
            root.listeners.append(ear)
            self.ears.append(ear)

    def _lane(self) -> TransferStream:
        if self.device.type == "cuda":
            return CudaTransfer(self.device, from_disk=self.lever.store == "disk")
        return ThreadTransfer()

    @host_edit
    def undo(self) -> None:
        """Every weight back to a device and memory of its own; hooks and files are gone."""
        if hasattr(self, "conveyor"):
            self.conveyor.runs = 0
            self.conveyor.settle()
        for ear in self.ears:
            if ear in ear.root.listeners:
                ear.root.listeners.remove(ear)
        for link in reversed(self.links):
            link.remove()
        self.links, self.ears = [], []
        for block in self.blocks:
            for box in block.boxes:
                box.give_back()
                box.close()
            block.boxes.clear()
        for tensor, device in self.moved_home:
            tensor.data = tensor.data.to(device)
        self.moved_home = []
        if self.store is not None:
            self.store.close()

    # ---- a run ---------------------------------------------------------------------------------------------

    def relink(self) -> None:
        """Before a run: hooks that others dropped are put back; another offload switched on since is refused."""
        foreign = other_offload(self.target)
        if foreign is not None:
            raise IncompatibleError(
                f"{foreign} was switched on while {self.lever.name} is on: both move the same weights. Call "
                "pipe.disable_offload() first"
            )
        for link in self.links:
            link.relink()

    def begin_run(self, run: Run) -> None:
        """Take in what became of the weights since the last run."""
        if not self.conveyor.runs:
            stale = [block for block in self.blocks if self._changed(block)]
            if stale:
                self.shared = shared_of(self.target, [block for block, _ in find_blocks(self.target).blocks])
            for block in stale:
                self.renew(block)
        self.conveyor.open()
        run.state[self.lever.name] = dict(zip(NAMES, self._counts(), strict=True))

    def end_run(self, run: Run) -> None:
        """Everything is parked again."""
        if self.lever.name in run.state:
            self.conveyor.close()

    def _counts(self) -> list[float]:
        return [getattr(self.conveyor.tally, name) for name in NAMES]

    def stats(self, run: Run) -> dict[str, Any]:
        """What this run moved and waited for, and the most that was on the device at once."""
        before = run.state.get(self.lever.name, {})
        lane = self.conveyor.lane
        now = dict(zip(NAMES, self._counts(), strict=True))
        now["read_s"] += lane.read_s if lane is not None else 0.0
        found: dict[str, Any] = {name: now[name] - before.get(name, now[name]) for name in NAMES}
        read_s = found.pop("read_s")
        found["wait_s"] = round(found["wait_s"], 6)
        tally: TransferCounts = self.conveyor.tally
        found |= {"live_blocks_peak": tally.live_blocks_peak, "live_bytes_peak": tally.live_bytes_peak}
        if read_s > 0:
            found["read_gb_s"] = round(found["bytes_moved"] / read_s / 1e9, 3)
        return found

    # ---- weights that changed ------------------------------------------------------------------------------

    def _changed(self, block: Block) -> bool:
        known = {id(slot.tensor) for box in block.boxes for slot in box.slots}
        present = {id(t) for _, t in tensors_of(unwrap_module(block.module))} - self.shared
        return known != present or not block.intact()

    @host_edit
    def renew(self, block: Block) -> None:
        """Store what the block has got since, and forget what it has not any more; the rest stays as it is stored."""
        tensors = tensors_of(unwrap_module(block.module))
        present = {id(t) for _, t in tensors}
        kept: list[StoredTensors] = []
        old: list[StoredTensors] = []
        for box in block.boxes:
            sound = all(box.holds(i) and id(slot.tensor) in present - self.shared for i, slot in enumerate(box.slots))
            (kept if sound else old).append(box)
        stored = {id(slot.tensor) for box in kept for slot in box.slots}
        fresh = [(name, t) for name, t in tensors if id(t) not in stored and id(t) not in self.shared]
        for box in old:
            box.give_back(present & self.shared)  # those stay on the device from now on
        new = [self._put(block, fresh)] if fresh else []
        block.boxes, block.generation = kept + new, block.generation + 1
        for box in new:
            box.park()
        for box in old:
            with contextlib.suppress(OSError):
                box.close()
