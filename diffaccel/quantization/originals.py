"""Where the original of a quantized weight stays, so that undo gives back its very bits.

"host": in RAM. "disk": in a file of ours. "source": nowhere; it is read again from the checkpoint the model came
from, and its hash must be that of the weight that was quantized. "no": nowhere, and undo is refused.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

if TYPE_CHECKING:
    from ..core.protocols import Pipeline

SOURCE, DISK, HOST, NO = "source", "disk", "host", "no"
MODES = (SOURCE, DISK, HOST, NO)


def digest(tensor: torch.Tensor) -> str:
    """A hash of a tensor's bytes, dtype and shape."""
    plain = tensor.detach().contiguous().cpu()
    found = hashlib.blake2b(f"{plain.dtype} {tuple(plain.shape)}".encode(), digest_size=16)
    found.update(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return found.hexdigest()


class Checkpoint:
    """The safetensors files a model was loaded from: tensor name -> files that hold one of this name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, list[Path]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - not a dict
                    self.files.setdefault(name, []).append(path)

    @classmethod
    def of(cls, pipe: Pipeline, component: str) -> Checkpoint | None:
        """The checkpoint of a pipeline's component, or None where it is not on this machine."""
        module = getattr(pipe, component)
        for folder in _folders(pipe, module, component):
            if any(folder.glob("*.safetensors")):
                return cls(folder)
        return None

    def candidates(self, name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The tensors of this name (several variants may lie in one folder), cast as loading does."""
        for path in self.files.get(name, ()):
            with safe_open(path, framework="pt") as handle:
                yield handle.get_tensor(name).to(dtype)

    def find(self, name: str, dtype: torch.dtype, wanted: str) -> torch.Tensor | None:
        """The tensor of this name with the wanted hash."""
        return next((t for t in self.candidates(name, dtype) if digest(t) == wanted), None)


def _folders(pipe: Pipeline, module: nn.Module, component: str) -> Iterator[Path]:
    own = getattr(getattr(module, "config", None), "_name_or_path", None)
    parent = getattr(pipe.config, "_name_or_path", None) if hasattr(pipe, "config") else None
    for base in (own, parent):
        if not base:
            continue
        root = Path(str(base)) if Path(str(base)).is_dir() else _cached(str(base), component)
        if root is not None:
            yield from (folder for folder in (root / component, root) if folder.is_dir())


def _cached(repo: str, component: str) -> Path | None:
    """The local snapshot of a hub repository (nothing is downloaded)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, local_files_only=True, allow_patterns=[f"{component}/*"]))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


@dataclass(eq=False)
class Kept:
    """One original parameter. Where its bytes are elsewhere, the parameter itself is left empty."""

    name: str
    parameter: nn.Parameter
    mode: str
    dtype: torch.dtype
    wanted: str = ""  # hash, for "source"


@dataclass(eq=False)
class Originals:
    """The originals of one model's quantized weights.

    Attributes:
        mode: one of MODES.
        checkpoint: where "source" reads; a weight that is not there bit by bit stays on the host instead.
        shared: ids of parameters that other layers use too: those stay as they are.
    """

    mode: str
    checkpoint: Checkpoint | None = None
    shared: frozenset[int] = frozenset()
    kept: list[Kept] = field(default_factory=list)
    folder: Path | None = None

    def take(self, name: str, parameter: nn.Parameter) -> Kept:
        """Put an original away; `name` is its name in the model's state dict."""
        kept = Kept(name, parameter, HOST if id(parameter) in self.shared else self.mode, parameter.dtype)
        if kept.mode == SOURCE:
            wanted = digest(parameter)
            if self.checkpoint is not None and self.checkpoint.find(name, kept.dtype, wanted) is not None:
                kept.wanted = wanted
            else:
                kept.mode = HOST  # changed since it was loaded (a fused adapter), or never loaded
        if kept.mode == DISK:
            save_file({"weight": parameter.detach().contiguous().cpu()}, self._path(len(self.kept)))
        if kept.mode == HOST and parameter.device.type != "cpu" and id(parameter) not in self.shared:
            parameter.data = parameter.data.cpu()
        if kept.mode in (SOURCE, DISK):
            parameter.data = torch.empty(0, dtype=kept.dtype, device=parameter.device)
        self.kept.append(kept)
        return kept

    def _path(self, index: int) -> Path:
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="diffaccel-originals-"))
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        return self.folder / f"{index}.safetensors"

    def lost(self) -> str:
        """Why not every original can be had again, in words that can end a refusal; "" where all can."""
        if any(kept.mode == NO for kept in self.kept):
            return (
                f"keep_original={NO!r} kept no original weights; load the pipeline anew, or quantize with "
                f"keep_original={SOURCE!r}, {DISK!r} or {HOST!r} next time"
            )
        for index, kept in enumerate(self.kept):
            if kept.mode == SOURCE and self._read(index) is None:
                where = self.checkpoint.folder if self.checkpoint is not None else "(none)"
                return (
                    f"the original of {kept.name} is no longer in {where} as it was when it was quantized (other "
                    "bytes by its hash, or no such file); put the checkpoint back, or load the pipeline anew"
                )
            if kept.mode == DISK and not self._path(index).is_file():
                return f"the file with the original of {kept.name} is gone ({self._path(index)})"
        return ""

    def put_back(self, kept: Kept, device: torch.device) -> nn.Parameter:
        """The original parameter object with its bits, on a device. Ask `lost` before the first."""
        if kept.mode in (SOURCE, DISK):
            data = self._read(self.kept.index(kept))
            assert data is not None, kept.name
            kept.parameter.data = data.to(device)
        elif kept.parameter.device != device:
            kept.parameter.data = kept.parameter.data.to(device)
        return kept.parameter

    def _read(self, index: int) -> torch.Tensor | None:
        kept = self.kept[index]
        if kept.mode == DISK:
            return load_file(self._path(index))["weight"]
        return None if self.checkpoint is None else self.checkpoint.find(kept.name, kept.dtype, kept.wanted)

    def close(self) -> None:
        """Remove the files of ours."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None
        self.kept.clear()

    def counts(self) -> Mapping[str, int]:
        """How many originals are where."""
        return {
            mode: sum(k.mode == mode for k in self.kept) for mode in MODES if any(k.mode == mode for k in self.kept)
        }
