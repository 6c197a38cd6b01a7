"""Layerwise offload: few transformer blocks on the device, the rest on the host or on disk, fetched while it computes.

The result is exact: what computes are the same bytes. `attached.py` holds the pipeline's side of it, `prefetch.py` the
order, `store.py` the other place.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ...core.compat import unwrap_module
from ...core.options import BOOLEAN, choose_name, take, whole
from ...errors import BudgetError, IncompatibleError, InvalidOptionError
from ..bandwidth import host_bandwidth, token_sentence
from ..components import bytes_of, modules_of, require_device
from ..packing import tensors_of
from ..stage.peak import gib
from ..store import in_memory
from .attached import LayerwiseAttached
from .blocks import BlockTable, compiled_whole, compute_device, find_blocks, other_offload, work_per_token
from .partition import Partition, by_bytes, by_layers

STORES = ("host", "disk")


@dataclass(frozen=True)
class LayerwiseOffload:
    """Keep few blocks of the denoisers on the compute device.

    At most `resident_layers + prefetch` blocks are there at once: `resident_layers - 1` stay for good (spread evenly,
    the first block among them), one computes, `prefetch` are on their way. Weights that blocks share stay as well.

    Attributes:
        resident_layers: blocks on the device, the computing one included; at least 1.
        prefetch: blocks fetched ahead; 0 fetches each block when it is due.
        store: "host" (page-locked memory, for a GPU) or "disk" (files, which also frees the host's memory).
        pin: lock the host memory; None does so where there is a GPU.
        max_bytes: bytes of block weights on the device, in place of `resident_layers`.
        folder: where the files of store="disk" go; None is the system's folder for temporary files. They are removed
            when the offload ends.
        device: where to compute ("cuda"); None is where the pipeline is. Given another device, all that is not
            offloaded goes there, and back when the offload ends.

    Raises:
        InvalidOptionError: a value of the wrong type or out of range.
    """

    resident_layers: int = 2
    prefetch: int = 1
    store: str = "host"
    pin: bool | None = None
    max_bytes: int | None = None
    folder: str | None = None
    device: str | None = None

    name: ClassVar[str] = "offload.layerwise"
    slot: ClassVar[Slot] = Slot.MODULE
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT

    def __post_init__(self) -> None:
        take(self, whole(1), "resident_layers", prefix="offload_")
        take(self, whole(0), "prefetch", prefix="offload_")
        take(self, whole(1).or_none(), "max_bytes", prefix="offload_")
        choose_name(self, "store", STORES, prefix="offload_")
        take(self, BOOLEAN.or_none(), "pin", prefix="offload_")
        if self.folder is not None and not isinstance(self.folder, (str, os.PathLike)):
            raise InvalidOptionError(f"offload_folder={self.folder!r}: must be a path, or None")
        if self.folder is not None:
            object.__setattr__(self, "folder", os.fspath(self.folder))  # a plan holds text
        if self.folder is not None and self.store != "disk":
            raise InvalidOptionError("offload_folder is for offload_store='disk'; the store is 'host'")
        if self.device is not None:
            require_device(self.device)

    # ---- can it act? ---------------------------------------------------------------------------------------

    def check(self, target: Target) -> Verdict:
        """Needs a known stack of blocks, nobody else who moves weights, room for the store, and something to gain."""
        spec = target.spec
        if not spec.stack:
            return Verdict.no(f"{spec.family}: {spec.no_stack}; there are no blocks to take turns")
        whole = compiled_whole(target)
        if whole is not None:
            return Verdict.refuse(
                f"{whole} is compiled as a whole (torch.compile): its weights are read inside of one graph. Use "
                "compile=True, which compiles block by block",
                IncompatibleError,
            )
        foreign = other_offload(target)
        if foreign is not None:
            return Verdict.refuse(
                f"{foreign} moves the same weights: load the pipeline without it, or leave offload off",
                IncompatibleError,
            )
        device = compute_device(target, self.device)
        hardware = target.hardware
        if self.store == "host" and not hardware.may.own_memory and device.type in ("cpu", hardware.may.device):
            what = "the CPU" if hardware.kind == "cpu" else hardware.name
            return Verdict.no(f"the device is {what} and the weights are in its memory already: store='disk' frees it")
        try:
            seen = find_blocks(target)
            split = self.divide(seen)
        except IncompatibleError as error:
            return Verdict.refuse(str(error), IncompatibleError)
        except BudgetError as error:
            return Verdict.refuse(f"offload_{error}", BudgetError)
        if not split.moving:
            return Verdict.already(
                f"all {len(seen.sizes)} blocks ({gib(seen.total_bytes)}) fit within these limits: nothing moves"
            )
        why = self._no_room(seen, split) if self.store == "disk" else None
        return Verdict.refuse(why, BudgetError) if why else Verdict.yes(self._say(target, seen, split))

    def divide(self, seen: BlockTable) -> Partition:
        """Which blocks stay."""
        if self.max_bytes is not None:
            return by_bytes(seen.sizes, seen.shared_bytes, self.max_bytes, self.prefetch)
        return by_layers(seen.sizes, seen.shared_bytes, self.resident_layers, self.prefetch)

    def _no_room(self, seen: BlockTable, split: Partition) -> str | None:
        folder = Path(self.folder or tempfile.gettempdir())
        place = next((p for p in (folder, *folder.absolute().parents) if p.exists()), None)
        if place is None or not place.is_dir() or not os.access(place, os.W_OK):
            return f"offload_folder={str(folder)!r}: cannot write there"
        free = shutil.disk_usage(place).free
        if not seen.attached and free < split.moved_bytes:
            return f"offload_folder={str(folder)!r}: {free} bytes are free there, and {split.moved_bytes} are needed"
        return None

    def _say(self, target: Target, seen: BlockTable, split: Partition) -> str:
        stay = f"{len(split.kept)} of {len(seen.sizes)} blocks stay, {len(split.moving)} take turns in {split.buffers}"
        where = "the host" if self.store == "host" else str(self.folder or tempfile.gettempdir())
        text = f"{stay} buffer{'s' * (split.buffers > 1)}; {gib(split.moved_bytes)} on {where}"
        if self.store == "disk" and in_memory(self.folder):
            text += " (a file system in memory: nothing is saved)"
        return f"{text}; {self._free(target, seen, split)}"

    def _free(self, target: Target, seen: BlockTable, split: Partition) -> str:
        """Is it free, as far as can be said without a run?"""
        link = host_bandwidth(target.hardware)
        if self.store == "disk" or link is None:
            what = "this disk" if self.store == "disk" else str(target.hardware)
            return f"whether {what} keeps up shows in the report (wait_s, read_gb_s)"
        flops = sum(2.0 * work_per_token(block) for block, _ in seen.blocks)
        return token_sentence(split.moved_bytes, flops, link, target.hardware.name)

    def peak_bytes(self, target: Target) -> int:
        """The device memory that all weights of the pipeline need at most under this lever.

        Raises:
            BudgetError, IncompatibleError: as `check` refuses.
        """
        seen = find_blocks(target)
        away = seen.total_bytes - self.divide(seen).resident_bytes
        sizes = {name: bytes_of(tensors_of(unwrap_module(module))) for name, module in modules_of(target.pipe)}
        whole = bytes_of(pair for _, module in modules_of(target.pipe) for pair in tensors_of(unwrap_module(module)))
        after = {name: min(sizes[name], size) for name, size in target.quantized_bytes.items() if name in sizes}
        moving = set(
            seen.components
        )  # quantized, the blocks that are away are smaller too, about as much as their model
        share = sum(after.get(name, sizes[name]) for name in moving) / sum(sizes[name] for name in moving)
        return whole - sum(sizes[name] - size for name, size in after.items()) - round(away * share)

    def predict(self, target: Target) -> Mapping[str, Any]:
        """Bytes, from the weights as they are."""
        split = self.divide(find_blocks(target))
        return {
            "resident_bytes": split.resident_bytes,
            "moved_bytes_per_pass": split.moved_bytes,
            "origin": "computed",
        }

    # ---- at work -------------------------------------------------------------------------------------------

    def attach(self, target: Target, site: Site) -> Edit:
        """Store what takes turns, and hook every block."""
        device = compute_device(target, self.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise IncompatibleError(
                f"{self.name}: there is no CUDA device here; a plan for one can be made with plan()"
            )
        if self.store == "host" and device.type == "cpu":
            raise IncompatibleError(
                f"{self.name}: the pipeline is on the CPU, where store='host' moves nothing: give device='cuda' (or "
                "move the pipeline there), or store='disk'"
            )
        attached = LayerwiseAttached(self, target, site, device)
        attached.attach()
        return Edit(
            self.name,
            attached.undo,
            begin_run=attached.begin_run,
            end_run=attached.end_run,
            relink=attached.relink,
            stats=attached.stats,
            on_weights=True,
        )
