"""A layerwise offload at work on one pipeline: what is stored, what is hooked, and how all of it comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ...core.accelerator import Site, Target
from ...core.chain import Hook, Link, install
from ...core.compat import eager, host_edit, unwrap_module
from ...core.listener import Listener
from ...core.root import RootHook
from ...core.run import Call, Run
from ...core.state import PerRun
from ...errors import IncompatibleError
from ...models.quantizers import moving_state
from ..host_memory import trim_heap
from ..packing import follow, own_tensors, pack, plain_tensors, tensors_of
from ..store import DiskStore, HostStore, Store, StoredTensors
from ..transfer import CudaTransfer, ThreadTransfer, TransferStream
from .block import Block
from .blocks import HOOK, BlockTable, find_blocks, other_offload, shared_of
from .partition import Partition
from .prefetch import Prefetcher, TransferCounts

NAMES = ("blocks_moved", "bytes_moved", "wait_s", "read_s")


class Config(Protocol):
    """What is asked of the lever's config."""

    @property
    def name(self) -> str:
        """The plan item."""

    @property
    def store(self) -> str:
        """ "host" or "disk"."""

    @property
    def folder(self) -> str | None:
        """Where files go."""

    @property
    def pin(self) -> bool | None:
        """Lock host memory?"""

    @property
    def prefetch(self) -> int:
        """Blocks fetched ahead."""

    @property
    def device(self) -> str | None:
        """Where to compute, where that was said."""

    def divide(self, seen: BlockTable) -> Partition:
        """Which blocks stay."""


class _MovingHook(Hook):
    """Around a block that moves."""

    def __init__(self, prefetcher: Prefetcher, block: Block) -> None:
        super().__init__()
        self.prefetcher, self.block = prefetcher, block

    @eager
    def call(self, ref: Any, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, with its weights in place."""
        try:
            self.prefetcher.enter(self.block)
            return ref.body(*args, **kwargs)
        finally:
            self.prefetcher.leave(self.block)


class _KeptHook(Hook):
    """On a block that stays: others can be fetched while it computes."""

    def __init__(self, prefetcher: Prefetcher, index: int, component: str) -> None:
        super().__init__()
        self.prefetcher, self.index, self.component = prefetcher, index, component

    @eager
    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.prefetcher.kept_runs(self.index, self.component)
        return args, kwargs


class _CallListener(Listener):
    """Listens to a denoiser's calls."""

    def __init__(self, prefetcher: Prefetcher, root: RootHook) -> None:
        self.prefetcher, self.root = prefetcher, root

    def begin_call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The denoiser is about to run."""
        self.prefetcher.begin(call, self.root.listeners)

    def end_call(self, call: Call) -> None:
        """It returned or raised."""
        self.prefetcher.end(call)


class LayerwiseAttached:
    """The edit: `attach`, then runs, then `undo`."""

    def __init__(self, lever: Config, target: Target, site: Site, device: torch.device) -> None:
        self.lever, self.target, self.site, self.device = lever, target, site, device
        self.links: list[Link] = []
        self.listening: list[Callable[[], None]] = []
        self.moved_there: list[tuple[torch.Tensor, torch.device]] = []
        self.followed: list[tuple[Any, str, torch.Tensor]] = []  # (holder, attribute, what stood there)
        self.store: Store | None = None
        self.blocks: list[Block] = []
        self.prefetcher: Prefetcher

    # ---- on and off ----------------------------------------------------------------------------------------

    @host_edit
    def attach(self) -> None:
        """Store, evict, hook. Raises with all as it was."""
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
                block.set_stored([self._put(block, tensors_of(unwrap_module(block.module)))])
                if not disk:  # else the host would hold all weights twice
                    block.evict()
            for block in self.blocks:  # a disk that fills up has cost nothing so far
                block.evict()
            self._go_to_device(seen, split)
            self._hook(seen, split)
            trim_heap()
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
        origin = block.stored[0].layout[0][2] if block.stored else None
        return self.store.put(pack(((n, t) for n, t in tensors if id(t) not in self.shared), origin), block.label)

    def _go_to_device(self, seen: BlockTable, split: Partition) -> None:
        """All that does not move goes where the blocks compute, where that is asked for."""
        if self.lever.device is None:
            return
        moving = {id(t) for index in split.moving for _, t in tensors_of(unwrap_module(seen.blocks[index][0]))}
        for component in self.target.pipe.components.values():
            for child in component.modules() if isinstance(component, torch.nn.Module) else ():
                found = [inner for name, tensor in own_tensors(child) for inner in plain_tensors(name, tensor)]
                for _, inner in [*found, *moving_state(child)]:
                    if inner.device != self.device and (id(inner) not in moving or id(inner) in self.shared):
                        self.moved_there.append((inner, inner.device))
                        inner.data = inner.data.to(self.device)
            if isinstance(component, torch.nn.Module):
                self.followed += follow(component, self.device)

    def _hook(self, seen: BlockTable, split: Partition) -> None:
        kept_bytes = sum(seen.sizes[i] for i in split.kept) + seen.shared_bytes
        kept = (len(split.kept), kept_bytes)
        self.prefetcher = Prefetcher(
            self.blocks, kept, self.lever.prefetch, self.device, self._open_stream, self.renew
        )
        for block in self.blocks:
            hook = _MovingHook(self.prefetcher, block)
            block.link = install(block.module, hook, HOOK, rank=self.site.rank).around(hook.call)
            self.links.append(block.link)
        for index in split.kept:
            module, component = seen.blocks[index][0], seen.components[index]
            kept_hook = _KeptHook(self.prefetcher, index, component)
            self.links.append(install(module, kept_hook, HOOK, rank=self.site.rank))
        roots = self.site.roots.values()
        self.listening = [root.add(_CallListener(self.prefetcher, root), self.site.rank) for root in roots]

    def _open_stream(self) -> TransferStream:
        if self.device.type == "cuda":
            return CudaTransfer(self.device, from_disk=self.lever.store == "disk")
        return ThreadTransfer()

    @host_edit
    def undo(self) -> None:
        """Every weight back to a device and memory of its own; hooks and files are gone."""
        if hasattr(self, "prefetcher"):
            self.prefetcher.runs = 0
            self.prefetcher.settle()
        for stop in self.listening:
            stop()
        for link in reversed(self.links):
            link.remove()
        self.links, self.listening = [], []
        for block in self.blocks:
            for stored in block.stored:
                stored.give_back()
                stored.close()
            block.set_stored([])
        for tensor, device in self.moved_there:
            tensor.data = tensor.data.to(device)
        for holder, name, tensor in reversed(self.followed):
            setattr(holder, name, tensor)
        self.moved_there, self.followed = [], []
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
        if not self.prefetcher.runs:
            stale = [block for block in self.blocks if self._changed(block)]
            if stale:
                self.shared = shared_of(self.target, [block for block, _ in find_blocks(self.target).blocks])
            for block in stale:
                self.renew(block)
        self.prefetcher.open()
        run.state[self.lever.name] = PerRun(zip(NAMES, self._counts(), strict=True))

    def end_run(self, run: Run) -> None:
        """Everything is evicted again."""
        if self.lever.name in run.state:
            self.prefetcher.close()

    def _counts(self) -> list[float]:
        return [getattr(self.prefetcher.counts, name) for name in NAMES]

    def stats(self, run: Run) -> dict[str, Any]:
        """What this run moved and waited for, and the most that was on the device at once."""
        before = run.state.get(self.lever.name, PerRun())
        stream = self.prefetcher.stream
        now = dict(zip(NAMES, self._counts(), strict=True))
        now["read_s"] += stream.read_s if stream is not None else 0.0
        found: dict[str, Any] = {name: now[name] - before.get(name, now[name]) for name in NAMES}
        read_s = found.pop("read_s")
        found["wait_s"] = round(found["wait_s"], 6)
        counts: TransferCounts = self.prefetcher.counts
        found |= {"live_blocks_peak": counts.live_blocks_peak, "live_bytes_peak": counts.live_bytes_peak}
        if read_s > 0:
            found["read_gb_s"] = round(found["bytes_moved"] / read_s / 1e9, 3)
        return found

    # ---- weights that changed ------------------------------------------------------------------------------

    def _changed(self, block: Block) -> bool:
        known = {id(view.tensor) for stored in block.stored for view in stored.views}
        present = {id(t) for _, t in tensors_of(unwrap_module(block.module))} - self.shared
        return known != present or block.versions() is None

    @host_edit
    def renew(self, block: Block) -> None:
        """Store what the block has got since, and forget what it has not any more; the rest stays as it is stored."""
        tensors = tensors_of(unwrap_module(block.module))
        present = {id(t) for _, t in tensors}
        own = present - self.shared
        kept: list[StoredTensors] = []
        old: list[StoredTensors] = []
        for stored in block.stored:
            sound = all(stored.holds(i) and id(view.tensor) in own for i, view in enumerate(stored.views))
            (kept if sound else old).append(stored)
        known = {id(view.tensor) for stored in kept for view in stored.views}
        fresh = [(name, t) for name, t in tensors if id(t) in own and id(t) not in known]
        for stored in old:
            stored.give_back(present & self.shared)  # those stay on the device from now on
        new = [self._put(block, fresh)] if fresh else []
        for stored in new:
            stored.evict()
        block.set_stored(kept + new)
        for stored in old:
            with contextlib.suppress(OSError):
                stored.close()
