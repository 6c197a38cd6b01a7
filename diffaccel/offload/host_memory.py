"""Host memory as the system gives and takes it: private mappings, pages let go, freed heap, whole reads of files."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

from ..errors import DiffaccelError


def private_mapping(nbytes: int) -> mmap.mmap:
    """Memory that goes back to the system with the last reference, which the heap's often does not."""
    flags = {} if os.name == "nt" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return mmap.mmap(-1, max(1, nbytes), **flags)


def discard_pages(address: int, nbytes: int) -> None:
    """Unmap the pages of a file that were touched: they would count as this process's memory (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """Hand memory that was freed back to the system, where the C library keeps it for later (glibc does)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def read_file(fd: int, into: memoryview, offset: int, name: object) -> None:
    """Fill `into` with the bytes of a file from `offset` on; lets other threads run meanwhile.

    Raises:
        DiffaccelError: the file ends before that; `name` is what it is called.
    """
    done, size = 0, len(into)
    while done < size:
        count = os.preadv(fd, [into[done:]], offset + done)
        if not count:
            raise DiffaccelError(f"offload: {name} was cut short by somebody: its weights are lost")
        done += count
