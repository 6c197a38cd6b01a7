"""A text encoder's outputs, kept: on a hit the encoder is neither called nor loaded.

The key is everything the output depends on: the arguments by value (token ids and masks, hence tokenizer, prompt and
`max_sequence_length`), the weights by version (by content in files), the attributes of every submodule (a LoRA's
branch and scale, dropout's training flag) and how PyTorch computes.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...errors import DiffaccelError
from ...models.quantizers import moving_state
from ..packing import PLAIN
from .embeddings import FileStore, MemoryStore, PackedOutput, Unkeepable, feed, key_of, pack_output, unpack_output
from .residency import Group
from .settings import settings


class TextCache:
    """Answers calls of encoders from a memory store, then from a file store (None: none).

    Where an output cannot be kept (training mode, gradients, an object among arguments or outputs) the encoder runs;
    `bypassed` counts these calls.
    """

    def __init__(self, memory: MemoryStore, files: FileStore | None) -> None:
        self.memory, self.files = memory, files
        self.hits = self.misses = self.bypassed = 0
        self._contents: dict[str, tuple[int, str]] = {}  # component -> (version, hash of its weights)

    def answer(
        self,
        name: str,
        group: Group,
        module: torch.nn.Module,
        device: torch.device,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute: Callable[[], Any],
    ) -> Any:
        """The output of `compute()`, from a store where there is one that fits."""
        call = self._call_key(module, device, args, kwargs)
        if call is None:
            self.bypassed += 1
            return compute()
        key = f"{name}|{group.version}|{call}"
        found = self.memory.get(key)
        if found is None and self.files is not None:
            found = self.files.get(self._file_key(name, group, module, call))
            if found is not None:
                self.memory.put(key, found)
        if found is not None:
            self.hits += 1
            return unpack_output(found, device)
        self.misses += 1
        output = compute()
        self._keep(key, name, group, module, call, output)
        return output

    def learn(self, name: str, group: Group, module: torch.nn.Module) -> None:
        """Hash an encoder's weights while they are in memory (only files need that)."""
        if self.files is not None:
            self._content(name, group, module)

    def _keep(self, key: str, name: str, group: Group, module: torch.nn.Module, call: str, output: Any) -> None:
        try:
            kept: PackedOutput = pack_output(output)
        except Unkeepable:
            self.bypassed += 1
            return
        # What the encoder gave the first time depends on nothing but the key, so it holds under the version of then.
        self.memory.put(key, kept)
        if self.files is not None:
            try:
                self.files.put(self._file_key(name, group, module, call), kept)
            except OSError as error:
                raise DiffaccelError(f"text_store={str(self.files.folder)!r}: {error}") from error

    def _call_key(
        self, module: torch.nn.Module, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        if module.training or (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())):
            return None
        try:
            return f"{key_of([list(args), kwargs])}|{settings(module)}|{surroundings(device)}"
        except Unkeepable:
            return None

    def _file_key(self, name: str, group: Group, module: torch.nn.Module, call: str) -> str:
        return f"{type(module).__module__}.{type(module).__qualname__}|{self._content(name, group, module)}|{call}"

    def _content(self, name: str, group: Group, module: torch.nn.Module) -> str:
        known = self._contents.get(name)
        if known is None or known[0] != group.version:
            known = self._contents[name] = (group.version, content(module))
        return known[1]


def content(module: torch.nn.Module) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of every parameter and buffer, and how quantized ones are meant."""
    made = hashlib.sha256()
    for name, tensor in _named(module):
        feed(made, name, tensor)
    return made.hexdigest()


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield from _plain_tensors(name, tensor)
    for path, child in module.named_modules():
        yield from ((f"{path}.{name}", tensor) for name, tensor in moving_state(child))


def _plain_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if type(tensor) in PLAIN or not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        yield from ((f"{name}.{part}", inner) for part, inner in moving_state(tensor))
        return
    names, meaning = tensor.__tensor_flatten__()
    for inner in (name for name in names if isinstance(getattr(tensor, name), torch.Tensor)):
        yield from _plain_tensors(f"{name}|{type(tensor).__qualname__}|{meaning!r}|{inner}", getattr(tensor, inner))


def surroundings(device: torch.device) -> str:
    """What else the bits of a result depend on: versions, machine, precision settings."""
    import transformers

    cuda = device.type == "cuda"
    chip = torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} {torch.get_num_threads()}"
    capability = "" if cuda else torch.backends.cpu.get_cpu_capability()
    cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    precision = torch.get_float32_matmul_precision()
    how = (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )
    versions = f"{torch.__version__}|{transformers.__version__}"
    return f"{versions}|{device.type}|{chip}|{capability}|{cast}|{precision}|{how}"
