"""Stage offload: text encoders, denoiser and decoder take turns on the device.

Each component comes in when it is first called and leaves when one of another stage is called, or when the run
ends. In between its weights lie in (pinned) host memory or in files. Outputs of text encoders are kept per prompt.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ...core.compat import foreign_offload
from ...core.options import BOOLEAN, WHOLE_BYTES, take, whole
from ...core.unloaded import execution_device
from ...errors import BudgetError, IncompatibleError, InvalidOptionError, UnsupportedModelError
from ..components import component_sizes, modules_of, require_device
from ..store import in_memory
from .attached import StageAttached, attached, holder
from .peak import GIB, Component, Peak, Placement, choose_placement, gib, total_bytes

if TYPE_CHECKING:
    from ...core.protocols import Pipeline

STORES = ("host", "disk")
MIB = 1024**2


@dataclass(frozen=True)
class StageOffload:
    """Keep on the device only the components of the stage at work.

    The picture is bit-equal. Between runs every component is away; its parameters can still be read, written, saved
    and trained adapters loaded.

    Attributes:
        store: "host" or "disk"; None takes the host for a GPU (the disk, where `host_bytes` is too little for all
            weights) and the disk for a CPU, whose memory the host is.
        folder: where files go; None is the system's folder for temporary files. They are removed by `disable_offload`
            and `restore`.
        keep: names of components that stay where they are.
        in_turn: True: also encoders are in one at a time; None: only where the budget asks for it.
        text_cache_bytes: host memory for outputs of text encoders, least recently used out first; 0 keeps none.
        text_store: a folder in which outputs of text encoders outlive the process, found by the encoder's weights.
        host_bytes: the most host memory that weights and kept outputs may take; None sets no limit.
        device_bytes: the most device memory weights may take (`Budget(memory_gib=)` sets it); None sets no limit.
        device: the compute device, e.g. "cuda" for a pipeline that was loaded on the host; None is the pipeline's.
        pin: page-lock weights on the host, for faster transfers to a GPU.

    Raises:
        InvalidOptionError: a value of the wrong type or range.
    """

    store: str | None = None
    folder: str | None = None
    keep: tuple[str, ...] = ()
    in_turn: bool | None = None
    text_cache_bytes: int = 256 * MIB
    text_store: str | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None
    device: str | None = None
    pin: bool = True

    name: ClassVar[str] = "offload.stage"
    slot: ClassVar[Slot] = Slot.MODULE
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT

    def __post_init__(self) -> None:
        if self.store not in (None, *STORES):
            raise InvalidOptionError(f"offload_store={self.store!r}: allowed: {', '.join(STORES)}, None")
        for name in ("folder", "text_store"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (str, os.PathLike)):
                raise InvalidOptionError(f"offload_{name} must be a path or None, got {value!r}")
            if value is not None:
                object.__setattr__(self, name, os.fspath(value))
        listed = isinstance(self.keep, (list, tuple, set, frozenset))
        if not listed or not all(isinstance(name, str) for name in self.keep):
            raise InvalidOptionError(f"offload_keep must be names of components, got {self.keep!r}")
        object.__setattr__(self, "keep", tuple(self.keep))
        take(self, whole(0, WHOLE_BYTES), "text_cache_bytes", prefix="offload_")
        take(self, whole(1, WHOLE_BYTES).or_none(), "host_bytes", "device_bytes", prefix="offload_")
        take(self, BOOLEAN.or_none(), "in_turn", prefix="offload_")
        take(self, BOOLEAN, "pin", prefix="offload_")
        if self.device is not None:
            require_device(self.device)

    def params(self) -> dict[str, Any]:
        """What a plan shows: all but what says nothing; lists, as a file holds them."""
        return {**asdict(self), "keep": list(self.keep) or None}

    # ---- decisions, which touch nothing ----------------------------------------------------------------

    def compute_device(self, pipe: Pipeline) -> torch.device:
        """Where components work."""
        if self.device is not None:
            return torch.device(self.device)
        return execution_device(pipe)

    def _kind(self, target: Target) -> str:
        """Device type of the memory to be freed, "cpu" where it is the host's; the machine may be one not here."""
        hardware = target.hardware
        if hardware.kind == "cpu":
            return self.compute_device(target.pipe).type
        return hardware.may.device if hardware.may.own_memory else "cpu"

    def place(self, found: list[Component], compute: str) -> tuple[Placement, Peak]:
        """Store and turns for these components, and the predicted peaks of weights (and kept outputs).

        Raises:
            BudgetError: no placement keeps within `device_bytes` and `host_bytes`; says the least possible.
        """
        stores = (self.store,) if self.store is not None else (("disk",) if compute == "cpu" else STORES)
        turns = (self.in_turn,) if self.in_turn is not None else (False, True)
        kept = self.text_cache_bytes if any(part.stage == "encode" for part in found) else 0
        return choose_placement(found, compute, self.device_bytes, self.host_bytes, 0, kept, stores, turns)

    def peak_bytes(self, target: Target) -> int:
        """The device memory that weights need at most under this lever.

        Raises:
            BudgetError: as `place`.
        """
        found = component_sizes(target.pipe, target.spec, self.keep, target.quantized_bytes)
        return self.place(found, self._kind(target))[1].device_bytes

    def check(self, target: Target) -> Verdict:
        """Needs weights that nobody else moves, a store that frees memory, and limits that can be kept."""
        pipe = target.pipe
        names = [name for name, _ in modules_of(pipe)]
        strange = [name for name in self.keep if name not in names]
        if strange:
            return Verdict.no(
                f"offload_keep: {', '.join(strange)}: no such component; there are {', '.join(names)}",
                InvalidOptionError,
            )
        foreign = next(((n, w) for n, m in modules_of(pipe) if (w := foreign_offload(m)) is not None), None)
        if foreign is not None:
            return Verdict.refuse(
                f"{foreign[0]} is moved by {foreign[1]} already: take that off first, or leave offloading to it",
                IncompatibleError,
            )
        other = holder(pipe, self.keep)
        if other is not None:
            return Verdict.refuse(
                f"{other} is shared with a pipeline that offloads it already: restore that one first, or keep it here "
                f"(offload_keep=({other!r},))",
                IncompatibleError,
            )
        kind = self._kind(target)
        if kind == "cpu" and self.store == "host":
            return Verdict.no(
                f"the compute device is {'the CPU' if target.hardware.kind == 'cpu' else target.hardware.name}, whose "
                "memory the host's is: moving weights there frees nothing; store='disk' does"
            )
        return self._fits(target, kind)

    def _fits(self, target: Target, kind: str) -> Verdict:
        try:
            found = component_sizes(target.pipe, target.spec, self.keep, target.quantized_bytes)
            placement, peak = self.place(found, kind)
        except IncompatibleError as error:
            return Verdict.refuse(str(error), IncompatibleError)
        except BudgetError as error:
            return Verdict.refuse(str(error), BudgetError)
        if not any(part.stage != "always" for part in found):
            return Verdict.no(f"{type(target.pipe).__name__} has no weights that could move", UnsupportedModelError)
        whole = total_bytes(found)
        why_not = self._no_disk(whole) if placement.store == "disk" and not attached(target.pipe) else None
        if why_not is not None:
            return why_not
        turns = ", one at a time" if placement.in_turn else ""
        limit = f", host at most {gib(peak.host_bytes)}" if kind != "cpu" else ""
        weights = f"at most {gib(peak.device_bytes)} of {gib(whole)} of weights on the device ({peak.worst})"
        return Verdict.yes(f"stages take turns{turns}, the rest on {placement.store}: {weights}{limit}")

    def _no_disk(self, count_bytes: int) -> Verdict | None:
        folder = Path(self.folder or tempfile.gettempdir())
        there = next(place for place in (folder, *folder.parents) if place.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            return Verdict.no(f"offload_folder={str(folder)!r} cannot be written to", InvalidOptionError)
        if in_memory(there):
            return Verdict.no(
                f"offload_folder={str(folder)!r} is on a file system in memory, which would free none: name a folder "
                "on a disk",
                InvalidOptionError,
            )
        free = shutil.disk_usage(there).free
        if free < count_bytes:
            return Verdict.refuse(
                f"offload_folder={str(folder)!r}: {gib(count_bytes)} of weights are to be written, but only "
                f"{gib(free)} are free",
                BudgetError,
            )
        return None

    def predict(self, target: Target) -> Mapping[str, Any]:
        """Peaks of weights on device and host, computed from their sizes; the time is unmeasured."""
        found = component_sizes(target.pipe, target.spec, self.keep, target.quantized_bytes)
        placement, peak = self.place(found, self._kind(target))
        return {
            "weights_gib": round(peak.device_bytes / GIB, 4),
            "host_gib": round(peak.host_bytes / GIB, 4),
            "store": placement.store,
            "origin": "computed",
        }

    # ---- doing it --------------------------------------------------------------------------------------

    def attach(self, target: Target, site: Site) -> Edit:
        """Put every component away, and bring each in when it is called."""
        device = self.compute_device(target.pipe)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise IncompatibleError(f"{self.name}: there is no CUDA device here; a plan for one is made with plan()")
        if device.type == "cpu" and self.store == "host":
            raise IncompatibleError(
                f"{self.name}: the pipeline is on the CPU, where store='host' moves nothing: give device='cuda' (or "
                "move the pipeline there), or store='disk'"
            )
        switch = StageAttached(self, target, site.rank)
        switch.attach()
        return Edit(
            self.name,
            switch.detach,
            begin_run=switch.begin_run,
            end_run=switch.end_run,
            relink=switch.follow,
            stats=switch.stats,
            on_weights=True,
        )
