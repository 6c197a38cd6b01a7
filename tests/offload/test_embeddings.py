"""The store of encoder outputs: what comes back, what goes first, and files that cannot be trusted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from diffaccel.errors import InvalidOptionError
from diffaccel.offload.stage.embeddings import (
    FileStore,
    MemoryStore,
    PackedOutput,
    Unkeepable,
    key_of,
    pack_output,
    unpack_output,
)


def output(seed: int = 0) -> BaseModelOutputWithPooling:
    """An output in which one tensor occurs twice and another is transposed."""
    made = torch.Generator().manual_seed(seed)
    last = torch.randn(1, 4, 8, generator=made)
    return BaseModelOutputWithPooling(
        last_hidden_state=last,
        pooler_output=torch.randn(8, 1, generator=made).t(),
        hidden_states=(torch.randn(1, 4, 8, generator=made, dtype=torch.float64).bfloat16(), last),
    )


def same(a: Any, b: Any) -> bool:
    """Equal classes, keys and bits."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


@pytest.mark.parametrize(
    "value",
    [output(), (torch.arange(3), None, 1.5), [torch.zeros(0), {"a": torch.tensor(True)}], torch.randn(3, 5).t()],
    ids=["output", "tuple", "list", "tensor"],
)
def test_what_is_put_in_comes_back(value: Any, tmp_path: Path) -> None:
    kept = pack_output(value)
    assert same(unpack_output(kept), value)
    files = FileStore(tmp_path)
    files.put("key", kept)
    found = FileStore(tmp_path).get("key")
    assert found is not None and same(unpack_output(found), value)


def test_every_answer_is_its_own_copy() -> None:
    """A pipeline may write into what it gets, and into what the encoder returned, without touching the store."""
    given = output()
    kept = pack_output(given)
    given.last_hidden_state.zero_()
    first = unpack_output(kept)
    first.last_hidden_state.add_(1)
    assert same(unpack_output(kept), output())
    assert first.hidden_states[1] is first.last_hidden_state, "one tensor in two places stays one tensor"


class _Object:
    pass


@pytest.mark.parametrize("value", [_Object(), (torch.ones(1), _Object()), {1: torch.ones(1)}])
def test_what_cannot_be_kept_is_refused(value: Any) -> None:
    with pytest.raises(Unkeepable):
        pack_output(value)


def test_a_file_names_no_other_class(tmp_path: Path) -> None:
    """A form that names something else than an output class of the libraries is not followed."""
    kept = pack_output(BaseModelOutput(last_hidden_state=torch.ones(2)))
    for path in ("os:system", "transformers.modeling_utils:PreTrainedModel", "transformers.nothing:X"):
        with pytest.raises((Unkeepable, ModuleNotFoundError)):
            unpack_output(PackedOutput(kept.tensors, {"class": path, "fields": {}}))


def kept(size: int) -> PackedOutput:
    """A packed tensor of so many bytes."""
    return pack_output(torch.zeros(size, dtype=torch.uint8))


def test_least_recently_used_goes_first() -> None:
    store = MemoryStore(100)
    for key in "abc":
        store.put(key, kept(30))
    assert store.get("a") is not None
    store.put("d", kept(30))
    assert [key for key in "abcd" if store.get(key) is not None] == ["a", "c", "d"]
    assert store.size_bytes == 90 and len(store) == 3
    store.put("e", kept(101))
    assert store.too_large == 1 and store.size_bytes == 90, "one that never fits drives nothing out"
    store.put("a", kept(100))
    assert len(store) == 1 and store.size_bytes == 100
    assert (store.hits, store.misses) == (4, 1)
    store.clear()
    assert store.size_bytes == 0 and store.get("a") is None


@pytest.mark.parametrize("limit", [-1, 1.5, True, None])
def test_bad_limits(limit: Any) -> None:
    with pytest.raises(InvalidOptionError, match="limit_bytes"):
        MemoryStore(limit)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("spoil", [_cut, _flip, _empty])
def test_a_spoilt_file_counts_as_absent(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("key", pack_output(output()))
    spoil(store.path("key"))
    assert store.get("key") is None and store.spoilt == 1
    store.put("key", pack_output(output()))
    assert store.get("key") is not None


def test_a_file_of_another_key_counts_as_absent(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("mine", pack_output(output()))
    store.path("mine").rename(store.path("other"))
    assert store.get("other") is None and store.spoilt == 1


def test_no_folder_to_write_in(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InvalidOptionError, match="text_store"):
        FileStore(file / "below")


def test_keys_tell_values_apart() -> None:
    ids = torch.tensor([[1, 2, 3]])
    base = key_of([[ids], {"output_hidden_states": True}])
    assert key_of([[ids.clone()], {"output_hidden_states": True}]) == base
    others = [
        [[torch.tensor([[1, 2, 4]])], {"output_hidden_states": True}],
        [[ids.int()], {"output_hidden_states": True}],
        [[ids.reshape(3, 1)], {"output_hidden_states": True}],
        [[ids], {"output_hidden_states": 1}],
        [[ids], {"output_hidden_states": True, "mask": None}],
        [[ids, None], {"output_hidden_states": True}],
    ]
    keys = [base, *(key_of(other) for other in others)]
    assert len(set(keys)) == len(keys)
    with pytest.raises(Unkeepable):
        key_of([_Object()])
