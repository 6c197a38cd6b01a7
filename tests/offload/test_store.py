"""Stored weights: every form of tensor comes back, edits go along, files belong to one store and go with it."""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from diffaccel import BudgetError, DiffaccelError, IncompatibleError, InvalidOptionError
from diffaccel.offload.packing import ALIGN, pack, shared_between, tensors_of
from diffaccel.offload.store import FOLDER_PREFIX, DiskStore, HostStore, StoredTensors, in_memory


class Oddities(torch.nn.Module):
    """Parameters and buffers of many forms."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.plain = torch.nn.Parameter(torch.randn(5, 7, generator=draw))
        self.narrow = torch.nn.Parameter(torch.randn(3, 3, generator=draw).bfloat16())
        self.turned = torch.nn.Parameter(torch.randn(4, 6, generator=draw).t())
        whole = torch.randn(12, generator=draw)
        self.view = torch.nn.Parameter(whole[2:8].view(2, 3))
        self.overlap = torch.nn.Parameter(whole[4:10])  # shares two numbers with `view`
        self.gaps = torch.nn.Parameter(torch.randn(4, 8, generator=draw)[:, ::2])
        self.tied = self.plain
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("bytes", torch.arange(9, dtype=torch.uint8))
        self.register_buffer("waves", torch.randn(3, generator=draw) + 1j)
        self.register_buffer("nothing", torch.empty(0))


def looks(module: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Everything that must come back of a module's tensors."""
    rows = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    return [(name, id(t), t.dtype, t.shape, t.stride(), t.tolist()) for name, t in rows]


@pytest.fixture(params=["disk", "host"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Each kind of store."""
    made = DiskStore(tmp_path) if request.param == "disk" else HostStore(pin=False)
    yield made
    made.close()


def fetched(stored: StoredTensors) -> torch.Tensor:
    """All bytes of a stored, as a read brings them."""
    found = torch.zeros(stored.nbytes, dtype=torch.uint8)
    stored.read(memoryview(found.numpy()))
    return found


def test_every_form_comes_back(store: Any) -> None:
    """Parked and brought back: same objects, forms and numbers; overlaps go on overlapping; ties are stored once."""
    module = Oddities()
    before = looks(module)
    packed = pack(tensors_of(module))
    assert len({id(view.tensor) for view in packed.views}) == len(packed.views) == 10
    assert all(chunk.offset % ALIGN == chunk.source.data_ptr() % ALIGN for chunk in packed.chunks)
    stored = store.put(packed, "odd")
    assert looks(module) == before
    assert not any(stored.holds(i) for i in range(len(stored.views)))
    stored.evict()
    assert looks(module) == before and all(stored.holds(i) for i in range(len(stored.views)))
    module.view.data[1, 0] = 42.0
    assert module.overlap[1] == 42.0 and dict(module.named_parameters())["overlap"].tolist()[1] == 42.0
    stored.give_back()
    assert not any(stored.holds(i) for i in range(len(stored.views)))
    assert module.view[1, 0] == 42.0 and module.overlap[1] == 42.0
    module.view.data[1, 0] = before[3][5][1][0]
    assert looks(module) == before
    stored.close()


def test_addresses_keep_their_remainder(store: Any) -> None:
    """Stored, brought in and brought back, a weight lies as far from a multiple of 64 as it did: kernels care."""
    layer = torch.nn.Linear(16, 16)
    whole = torch.randn(16 * 16 + 5)
    layer.weight.data = whole[5:].view(16, 16)
    before = layer.weight.data_ptr() % ALIGN
    assert before == 20
    stored = store.put(pack(tensors_of(layer)), "layer")
    stored.evict()
    assert layer.weight.data_ptr() % ALIGN == before
    buffer = torch.empty(stored.nbytes, dtype=torch.uint8)
    views = [view.on(buffer, stored.layout[view.chunk][0]) for view in stored.views]
    assert {view.data_ptr() % ALIGN for view in views} == {before, layer.bias.data_ptr() % ALIGN}
    stored.give_back()
    assert layer.weight.data_ptr() % ALIGN == before and torch.equal(layer.weight, whole[5:].view(16, 16))
    stored.close()


@pytest.mark.parametrize("how", ["copy_", "data", "inference"])
def test_edits_of_parked_weights_are_what_is_read(store: Any, how: str) -> None:
    """A weight written to while it is away, by whatever route, is the weight that the next read brings."""
    layer = torch.nn.Linear(8, 8)
    stored = store.put(pack(tensors_of(layer)), "layer")
    stored.evict()
    new = torch.randn(8, 8)
    if how == "copy_":
        layer.load_state_dict({"weight": new, "bias": layer.bias})
    elif how == "data":
        layer.weight.data += new - layer.weight.data  # as a fused LoRA does
        new = layer.weight.detach().clone()
    else:
        with torch.inference_mode():
            layer.weight.copy_(new)
    assert all(stored.holds(i) for i in range(2))
    found = fetched(stored)
    views = [view.on(found, stored.layout[view.chunk][0]) for view in stored.views]
    assert any(torch.equal(view, new) for view in views)
    stored.close()


# ---- files -------------------------------------------------------------------------------------------------


def test_files_are_safetensors_named_by_content(tmp_path: Path) -> None:
    """Another program can read them; other weights have another name; equal weights are two files all the same."""
    store = DiskStore(tmp_path)
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    layers.append(torch.nn.Linear(4, 4))
    layers[2].load_state_dict(layers[0].state_dict())
    paths = []
    for layer in layers:
        stored = store.put(pack(tensors_of(layer)), "layer")
        paths.append(stored.path)
        read = load_file(stored.path)
        assert torch.equal(read["weight"], layer.weight) and torch.equal(read["bias"], layer.bias)
    hashes = [path.stem.split("-")[1] for path in paths]
    assert len(set(paths)) == 3 and hashes[0] == hashes[2] != hashes[1]
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_two_stores_share_nothing(tmp_path: Path) -> None:
    """Two stores of one folder have folders of their own; the end of one leaves the other's files."""
    first, second = DiskStore(tmp_path), DiskStore(tmp_path)
    layer = torch.nn.Linear(4, 4)
    stored = second.put(pack(tensors_of(layer)), "layer")
    first.close()
    assert stored.path.exists() and torch.equal(fetched(stored)[:64].view(torch.float32), layer.weight.flatten())
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_forgotten_store_cleans_up(tmp_path: Path) -> None:
    """Without `close`, the folder goes with the object."""
    store = DiskStore(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    del store
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_process_go(tmp_path: Path) -> None:
    """A killed process leaves its folder; the next store there removes it, but not that of a living one."""
    alive = DiskStore(tmp_path)
    child = os.fork()
    if not child:  # no clean-up of its own: it is killed
        store = DiskStore(tmp_path)
        store.put(pack(tensors_of(torch.nn.Linear(4, 4))), "layer")
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(list(tmp_path.glob(f"{FOLDER_PREFIX}*"))) == 2
    (tmp_path / f"{FOLDER_PREFIX}of-somebody-else").mkdir()
    new = DiskStore(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [alive.folder.name, new.folder.name, f"{FOLDER_PREFIX}of-somebody-else"]
    )
    alive.close()
    new.close()


def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    """Never other bytes than those that were stored."""
    store = DiskStore(tmp_path)
    stored = store.put(pack(tensors_of(torch.nn.Linear(64, 64))), "layer")
    os.truncate(stored.path, 5000)
    with pytest.raises(DiffaccelError, match="cut short"):
        fetched(stored)
    store.close()


def test_full_disk(tmp_path: Path) -> None:
    """A file that cannot be written to its end: numbers in the error, nothing left, weights as they were."""
    store = DiskStore(tmp_path)
    layer = torch.nn.Linear(256, 256)
    before = looks(layer)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(BudgetError, match=r"offload_folder=.*263168 bytes of layer.*File too large"):
            store.put(pack(tensors_of(layer)), "layer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in store.folder.iterdir()] == ["lock"] and looks(layer) == before
    store.close()


def test_no_folder(tmp_path: Path) -> None:
    """A folder below a file cannot be made."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidOptionError, match=r"offload_folder=.*cannot write there"):
        DiskStore(tmp_path / "file" / "below")


def test_memory_file_systems_are_known(tmp_path: Path) -> None:
    """/dev/shm is memory; an ordinary folder is not."""
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no /dev/shm here")
    assert in_memory("/dev/shm/below") and not in_memory("/proc/self")


# ---- what cannot be moved, and what is shared --------------------------------------------------------------


def test_tensors_that_cannot_be_moved() -> None:
    """Named, with the reason."""
    module = torch.nn.Module()
    with torch.inference_mode():
        module.register_buffer("fixed", torch.ones(3))
    with pytest.raises(IncompatibleError, match=r"fixed: made under torch.inference_mode"):
        tensors_of(module)
    module = torch.nn.Module()
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(IncompatibleError, match="sparse"):
        tensors_of(module)


def test_shared_memory_is_found() -> None:
    """One Parameter in two blocks, two Parameters on one storage, and a weight that something outside uses."""
    blocks = [torch.nn.Linear(4, 4) for _ in range(4)]
    blocks[1].weight = blocks[0].weight
    blocks[2].bias.data = blocks[3].bias.data[:4]
    outside = torch.nn.Module()
    outside.weight = blocks[3].weight
    model = torch.nn.ModuleList([torch.nn.ModuleList(blocks), outside])
    names = {id(t): f"{i}.{name}" for i, block in enumerate(blocks) for name, t in block.named_parameters()}
    found = {names[i] for i in shared_between([model], blocks)}
    assert found == {"1.weight", "2.bias", "3.bias", "3.weight"}
    assert shared_between([torch.nn.ModuleList([torch.nn.Linear(2, 2)])], []) == set()


def test_new_nested_folders_go_with_the_last_store(tmp_path: Path) -> None:
    """F11: folders that a store made go when they are empty; what was there before, or holds a user's file, stays."""
    (tmp_path / "there").mkdir()
    nested = tmp_path / "there" / "new" / "deep"
    first, second = DiskStore(nested), DiskStore(nested)
    first.close()
    assert nested.is_dir(), "the second one uses it"
    second.close()
    assert list((tmp_path / "there").iterdir()) == []
    third = DiskStore(nested)
    (nested.parent / "mine.txt").write_text("mine")
    third.close()
    assert [path.name for path in (tmp_path / "there" / "new").iterdir()] == ["mine.txt"]
    again = DiskStore(tmp_path / "there")
    again.close()
    assert (tmp_path / "there").is_dir()


@pytest.mark.parametrize("kind", ["layerwise", "stage"])
def test_an_offload_leaves_no_folder(kind: str, tmp_path: Path) -> None:
    from diffaccel import accelerate, restore
    from tests import tiny

    pipe = tiny.build("flux")
    accelerate(pipe, None, strict=True, offload=kind, offload_store="disk", offload_folder=str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    restore(pipe)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_used_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> str:
        raise OSError("no space")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(InvalidOptionError, match="no space"):
        DiskStore(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
