"""Where the weights of blocks that are not resident lie: files of a private folder, or pinned host memory.

Either way what is stored is a mapping that tensors can point into: evicted weights stay readable and
writable (`state_dict`, `save_pretrained`, `load_state_dict`, a fused LoRA), and what is written there is what the
next read brings. Files are mapped shared, so that an edit goes to the file; no file is ever taken up again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any, Protocol

import torch

from ..core.compat import host_edit
from ..errors import BudgetError, DiffaccelError, InvalidOptionError
from .host_memory import private_mapping, read_file
from .packing import ALIGN, Chunk, PackedTensors, View

try:
    import fcntl
except ImportError:  # Windows: leftovers of a killed process are not looked for
    fcntl = None  # type: ignore[assignment]

PAGE = 4096
FOLDER_PREFIX = "diffaccel-offload-"
LOCK = "lock"
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class StoredTensors:
    """Packed tensors as they are stored. `flat` is its memory (uint8, on the host), gaps between chunks included."""

    def __init__(
        self, packed: PackedTensors, area: Any, base: int, fd: int | None = None, path: Path | None = None
    ) -> None:
        self.views, self.nbytes = packed.views, packed.nbytes
        self.layout = [(chunk.offset, chunk.nbytes, chunk.origin) for chunk in packed.chunks]
        self.fd, self.path, self.base = fd, path, base
        self.flat = torch.frombuffer(area, dtype=torch.uint8, count=packed.nbytes, offset=base)
        # One storage per chunk, so that a file of the model written meanwhile does not think them one tensor.
        chunks = [torch.frombuffer(area, dtype=torch.uint8, count=n, offset=base + at) for at, n, _ in self.layout]
        self.mapped = [view.on(chunks[view.chunk]) for view in packed.views]
        self.unpin: weakref.finalize[..., Any] | None = None

    def holds(self, index: int) -> bool:
        """Does the tensor of view `index` still point here, in the form it was stored in?"""
        tensor, mapped = self.views[index].tensor, self.mapped[index]
        same = tensor.data_ptr() == mapped.data_ptr() and tensor.dtype == mapped.dtype
        return same and tensor.shape == mapped.shape and tensor.stride() == mapped.stride()

    def evict(self) -> None:
        """Point the tensors here."""
        for view, mapped in zip(self.views, self.mapped, strict=True):
            view.tensor.data = mapped

    @host_edit
    def give_back(self, keep: set[int] | None = None) -> None:
        """Memory of their own, on the device they came from, for the tensors that still point here.

        `keep` are ids of the tensors to do this for; None: all.
        """
        chosen = [i for i, s in enumerate(self.views) if self.holds(i) and (keep is None or id(s.tensor) in keep)]
        fresh: dict[int, torch.Tensor] = {}
        for index in chosen:
            view = self.views[index]
            at, nbytes, device = self.layout[view.chunk]
            if view.chunk not in fresh:
                lead = at % ALIGN
                fresh[view.chunk] = torch.empty(lead + nbytes, dtype=torch.uint8, device=device)[lead:]
                fresh[view.chunk].copy_(self.flat[at : at + nbytes])
            view.tensor.data = view.on(fresh[view.chunk])

    def read(self, into: memoryview) -> None:
        """Bring all bytes into host memory; lets other threads run meanwhile.

        Raises DiffaccelError where the file has become shorter.
        """
        if self.fd is None:
            torch.frombuffer(into, dtype=torch.uint8).copy_(self.flat)
            return
        read_file(self.fd, into[: self.nbytes], self.base, self.path)

    def close(self) -> None:
        """Delete the file, or let the memory go. Tensors that still point here keep what they see."""
        if self.unpin is not None:
            self.unpin()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class Store(Protocol):
    """What keeps packed tensors."""

    def put(self, packed: PackedTensors, label: str) -> StoredTensors:
        """Store a copy; the tensors are not touched. Raises with nothing left behind."""

    def close(self) -> None:
        """Let go of everything."""


class HostStore:
    """Host memory, page-locked on request.

    Registered with CUDA as it is, rather than asked of PyTorch's pinned allocator, which rounds sizes up to powers
    of two.
    """

    def __init__(self, pin: bool) -> None:
        self.pin = pin

    def put(self, packed: PackedTensors, label: str) -> StoredTensors:
        """A flat copy in memory of its own."""
        stored = StoredTensors(packed, private_mapping(packed.nbytes), 0)
        for chunk in packed.chunks:
            stored.flat[chunk.offset : chunk.offset + chunk.nbytes].copy_(chunk.source)
        if self.pin:
            stored.unpin = _page_lock(stored.flat)
        return stored

    def close(self) -> None:
        """Stored tensors own their memory."""


def _page_lock(flat: torch.Tensor) -> weakref.finalize[..., Any]:
    runtime: Any = torch.cuda.cudart()
    code = runtime.cudaHostRegister(flat.data_ptr(), flat.numel(), 0)
    if int(code):
        raise BudgetError(
            f"offload_pin=True: the system does not lock {flat.numel()} bytes of host memory (CUDA error "
            f"{int(code)}); raise the limit of locked memory (ulimit -l), or give offload_pin=False"
        )
    return weakref.finalize(flat, runtime.cudaHostUnregister, flat.data_ptr())


class DiskStore:
    """One safetensors file per set of packed tensors, named after its content, in a folder that no other store uses.

    The folder goes with the store, at the latest when Python ends. What a killed process left in `parent` is
    cleared away by the next store made there.
    """

    def __init__(self, parent: str | os.PathLike[str] | None) -> None:
        self.parent = Path(parent or tempfile.gettempdir())
        try:
            _make(self.parent)
            _sweep(self.parent)
            self.folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=self.parent))
            self._lock = _claim(self.folder)
        except OSError as error:
            _unmake(self.parent)
            raise InvalidOptionError(f"offload_folder={str(self.parent)!r}: cannot write there ({error})") from None
        self._remove = weakref.finalize(self, _clear, self.folder, self._lock, os.getpid())
        self.count = 0

    def put(self, packed: PackedTensors, label: str) -> StoredTensors:
        """Write, read back, compare, and only then give the file its name."""
        head = _header(packed, label)
        draft = self.folder / "draft"
        try:
            name = f"{self.count:04d}-{_write(draft, packed, head)}.safetensors"
            path = self.folder / name
            os.replace(draft, path)
            fd = os.open(path, os.O_RDWR)
        except OSError as error:
            draft.unlink(missing_ok=True)
            free = shutil.disk_usage(self.parent).free
            raise BudgetError(
                f"offload_folder={str(self.parent)!r}: could not write the {packed.nbytes} bytes of {label} ({error}; "
                f"{free} bytes are free there)"
            ) from None
        try:
            area = mmap.mmap(fd, 0)
            stored = StoredTensors(packed, area, len(head), fd, path)
            _compare(stored, packed)
            if hasattr(mmap, "MADV_DONTNEED"):
                area.madvise(mmap.MADV_DONTNEED)  # of a shared mapping: the file's pages need not stay for our sake
        except BaseException as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise InvalidOptionError(
                    f"offload_folder={str(self.parent)!r}: files there cannot be mapped into memory ({error})"
                ) from None
            raise
        self.count += 1
        return stored

    def close(self) -> None:
        """Remove the folder."""
        self._remove()


def _header(packed: PackedTensors, label: str) -> bytes:
    """A safetensors header as long as whole pages; the gaps between chunks are entries of their own."""
    entries: dict[str, Any] = {"__metadata__": {"made_by": "diffaccel layerwise offload", "block": label}}
    at = 0
    for index, chunk in enumerate(packed.chunks):
        _gap(entries, at, chunk.offset)
        name, dtype, shape = _entry(packed, index, chunk)
        at = chunk.offset + chunk.nbytes
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [chunk.offset, at]}
    _gap(entries, at, packed.nbytes)
    text = json.dumps(entries).encode()
    padded = -(-(len(text) + 8) // PAGE) * PAGE - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def _gap(entries: dict[str, Any], begin: int, end: int) -> None:
    if end > begin:
        entries[f"gap.{begin}"] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


def _entry(packed: PackedTensors, index: int, chunk: Chunk) -> tuple[str, str, list[int]]:
    views: list[View] = [view for view in packed.views if view.chunk == index]
    first = views[0]
    if len(views) == 1 and first.dtype in DTYPES and first.tensor.is_contiguous():
        return first.name, DTYPES[first.dtype], list(first.size)
    return f"{first.name}.bytes", "U8", [chunk.nbytes]


def _write(path: Path, packed: PackedTensors, head: bytes) -> str:
    """Write a file to the end, onto the disk; returns the hash of what it holds."""
    digest = hashlib.blake2b(head, digest_size=16)
    with open(path, "xb") as file:
        file.write(head)
        at = 0
        for chunk in packed.chunks:
            file.write(bytes(chunk.offset - at))
            data = chunk.source.cpu().numpy().data
            digest.update(data)
            file.write(data)
            at = chunk.offset + chunk.nbytes
        file.write(bytes(packed.nbytes - at))
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _compare(stored: StoredTensors, packed: PackedTensors) -> None:
    for chunk in packed.chunks:
        if not torch.equal(stored.flat[chunk.offset : chunk.offset + chunk.nbytes], chunk.source.cpu()):
            raise DiffaccelError(
                f"offload: {stored.path} does not hold what was written to it; the weights stay in memory"
            )


def _claim(folder: Path) -> int | None:
    """Take the lock of a new folder, before the lock can be seen."""
    if fcntl is None:
        return None
    fd = os.open(folder / f"{LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.replace(folder / f"{LOCK}.new", folder / LOCK)
    return fd


_MADE: set[Path] = set()  # folders that this process made for its stores, so that it may take them away again


def _make(folder: Path) -> None:
    """Make a folder, and those above it; what was not there before is remembered."""
    folder = folder.absolute()
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    _MADE.update(missing)


def _unmake(folder: Path) -> None:
    """Remove the folders that `_make` made, as far up as they are empty: another store may still use them."""
    folder = folder.absolute()
    for place in (folder, *folder.parents):
        if place not in _MADE:
            return
        try:
            place.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return
        _MADE.discard(place)


def _clear(folder: Path, lock: int | None, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child that ends
    shutil.rmtree(folder, ignore_errors=True)
    _unmake(folder.parent)
    if lock is not None:
        with contextlib.suppress(OSError):
            os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove the folders of processes that were killed: those whose lock nobody holds."""
    if fcntl is None:
        return
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        try:
            fd = os.open(folder / LOCK, os.O_RDWR)
        except OSError:  # somebody else's, or not finished
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # alive
            pass
        finally:
            os.close(fd)


def in_memory(folder: str | os.PathLike[str] | None) -> bool:
    """Is this folder on a file system that lives in memory (tmpfs), where storing saves none?"""
    place = str(Path(folder or tempfile.gettempdir()).absolute())
    try:
        rows = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return False
    mounts = [(row[1], row[2]) for row in rows if place == row[1] or place.startswith(row[1].rstrip("/") + "/")]
    return bool(mounts) and max(mounts, key=lambda row: len(row[0]))[1] in ("tmpfs", "ramfs")
