"""Outputs of encoders, kept: in memory up to a cap (least recently used out first), and in files on request.

Plain data and tensors; who encodes what and when is not known here. An output is taken apart into tensors and a
JSON-able form (`pack_output`), so that both stores hold the same and a file holds no code. What a store gives back is
equal bit for bit to what was put in, and its own copy each time: a pipeline may write into it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...core.options import WHOLE_BYTES, confirm, whole
from ...errors import InvalidOptionError

Form = Any  # nested lists and dicts of JSON
_PLAIN = (bool, int, float, str, type(None))
LIBRARIES = ("transformers.", "diffusers.")  # whose output classes a file may name


class Unkeepable(TypeError):
    """A value that a store cannot give back as it was."""


@dataclass(frozen=True)
class PackedOutput:
    """A packed output: its tensors by name (on the host, nobody else's), and its form."""

    tensors: Mapping[str, torch.Tensor]
    form: Form

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def pack_output(output: Any) -> PackedOutput:
    """Take an encoder's output apart; its tensors are cloned to the host.

    Tensors, None, numbers, strings, tuples, lists, dicts and the output classes of transformers and diffusers.
    A tensor that occurs twice is kept once.

    Raises:
        Unkeepable: anything else (a key-value cache object, say).
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}

    def form(value: Any) -> Form:
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            name = names.setdefault(id(value), f"t{len(names)}")
            if name not in tensors:
                tensors[name] = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
            return {"tensor": name, "stride": list(value.stride())}
        if isinstance(value, _PLAIN):
            return {"plain": value}
        if type(value) in (tuple, list):
            return {type(value).__name__: [form(entry) for entry in value]}
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {"dict": {key: form(entry) for key, entry in value.items()}}
        if _is_output(type(value)):
            return {"class": _path(type(value)), "fields": {key: form(entry) for key, entry in value.items()}}
        raise Unkeepable(f"{type(value).__module__}.{type(value).__qualname__}")

    made = form(output)
    return PackedOutput(tensors, made)


def unpack_output(kept: PackedOutput, device: torch.device | str = "cpu") -> Any:
    """The output again, on `device`, with tensors of its own."""
    made: dict[str, torch.Tensor] = {}

    def build(form: Form) -> Any:
        ((kind, value),) = ((k, v) for k, v in form.items() if k not in ("stride", "fields"))
        if kind == "tensor":
            if value not in made:
                made[value] = _as_it_lay(kept.tensors[value], form["stride"], device)
            return made[value]
        if kind == "plain":
            return value
        if kind in ("tuple", "list"):
            entries = [build(entry) for entry in value]
            return tuple(entries) if kind == "tuple" else entries
        if kind == "dict":
            return {key: build(entry) for key, entry in value.items()}
        return _output_class(value)(**{key: build(entry) for key, entry in form["fields"].items()})

    return build(kept.form)


def _as_it_lay(tensor: torch.Tensor, stride: list[int], device: torch.device | str) -> torch.Tensor:
    """A copy with the strides of the original, since kernels may add in another order for another layout."""
    if list(tensor.stride()) == stride or 0 in stride:
        return tensor.clone() if tensor.device == torch.device(device) else tensor.to(device)
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=device)
    return made.copy_(tensor)


def _is_output(cls: type) -> bool:
    from diffusers.utils import BaseOutput
    from transformers.utils import ModelOutput

    return issubclass(cls, (BaseOutput, ModelOutput)) and cls.__module__.startswith(LIBRARIES)


def _path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _output_class(path: str) -> type[Any]:
    """The class behind `module:name`; only output classes of the two libraries, whatever a file says."""
    module, _, name = path.partition(":")
    if not module.startswith(LIBRARIES):
        raise Unkeepable(path)
    found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, type) or not _is_output(found):
        raise Unkeepable(path)
    return found


class MemoryStore:
    """Outputs by key, up to `limit_bytes` of tensors; the least recently used go first.

    An output larger than the limit is not kept. `hits`, `misses`, `too_large` count.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.size_bytes = confirm("limit_bytes", limit_bytes, whole(0, WHOLE_BYTES)), 0
        self.hits = self.misses = self.too_large = 0
        self._kept: OrderedDict[str, PackedOutput] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: str) -> PackedOutput | None:
        """What is kept under `key` (and most recently used now), or None."""
        found = self._kept.get(key)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(key)
        return found

    def put(self, key: str, kept: PackedOutput) -> None:
        """Keep an output, at the cost of the least recently used ones."""
        if kept.size_bytes > self.limit_bytes:
            self.too_large += 1
            return
        old = self._kept.pop(key, None)
        self.size_bytes += kept.size_bytes - (old.size_bytes if old is not None else 0)
        self._kept[key] = kept
        while self.size_bytes > self.limit_bytes:
            self.size_bytes -= self._kept.popitem(last=False)[1].size_bytes

    def clear(self) -> None:
        """Forget everything (the counts stay)."""
        self._kept.clear()
        self.size_bytes = 0


class FileStore:
    """Outputs by key in a folder, one safetensors file each; several processes may share it.

    A file is written beside and renamed, and carries its whole key and a digest of its tensors. One that is cut
    short, or belongs to another key, counts as absent (`spoilt`) and is written anew.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser()
        self.hits = self.misses = self.spoilt = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise InvalidOptionError(f"text_store={str(folder)!r} cannot be written to: {error}") from error

    def path(self, key: str) -> Path:
        """Where the output of `key` is kept."""
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.safetensors"

    def get(self, key: str) -> PackedOutput | None:
        """What is kept under `key`, verified, or None."""
        path = self.path(key)
        if not path.exists():
            self.misses += 1
            return None
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            if about.get("key") == key and about.get("digest") == digest(tensors):
                self.hits += 1
                return PackedOutput(tensors, json.loads(about["form"]))
        except (SafetensorError, OSError, KeyError, json.JSONDecodeError):
            pass
        self.spoilt += 1
        self.misses += 1
        return None

    def put(self, key: str, kept: PackedOutput) -> None:
        """Write an output; an error of the disk leaves no file behind."""
        about = {"key": key, "form": json.dumps(kept.form), "digest": digest(kept.tensors)}
        handle, name = tempfile.mkstemp(suffix=".part", dir=self.folder)
        os.close(handle)
        try:
            save_file(dict(kept.tensors), name, metadata=about)
            os.replace(name, self.path(key))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of the names."""
    made = hashlib.sha256()
    for name in sorted(tensors):
        feed(made, name, tensors[name])
    return made.hexdigest()


def feed(made: Any, name: str, tensor: torch.Tensor) -> None:
    """Add a named tensor to a hash."""
    made.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode())
    for piece in _pieces(tensor.detach()):
        made.update(piece.cpu().contiguous().view(torch.uint8).numpy())


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Contiguous parts of at most 64 MiB or so, flat, so that hashing a large weight copies little."""
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().reshape(-1)
    yield from flat.split(max(1, (64 << 20) // max(1, flat.element_size()))) if flat.numel() else ()


def key_of(value: Any) -> str:
    """A key for a call's arguments: tensors by dtype, shape and bytes, the rest by value.

    Raises:
        Unkeepable: an argument whose value cannot be told (an object).
    """
    made = hashlib.sha256()
    _feed_value(made, value)
    return made.hexdigest()


def _feed_value(made: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        feed(made, f"tensor{list(value.stride())}", value)
    elif isinstance(value, (*_PLAIN, torch.dtype, torch.device)):
        made.update(f"{type(value).__name__}:{value!r};".encode())
    elif type(value) in (tuple, list):
        made.update(f"{type(value).__name__}[{len(value)}".encode())
        for entry in value:
            _feed_value(made, entry)
    elif isinstance(value, Mapping):
        made.update(f"map[{len(value)}".encode())
        for key in sorted(value, key=str):
            made.update(f"{key!r}=".encode())
            _feed_value(made, value[key])
    else:
        raise Unkeepable(f"{type(value).__module__}.{type(value).__qualname__}")
