"""The capability table: what it says is so in diffusers, and calls that do not fit get a reason."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diffaccel.attention.backends import BACKENDS, SAGE, Backend, Package, absent, unfit, unfit_call
from diffaccel.attention.levers import METHODS, PLACE
from diffaccel.core.compat import AttentionBackendName, dispatch_attention
from diffaccel.ledger.hardware import HARDWARE

from .cases import tensors, truth

EVERY = [*BACKENDS.values(), *SAGE.values()]


def test_the_names_are_the_overrides() -> None:
    assert set(BACKENDS) | {"auto", "sage", "sparse_auto", "custom", *METHODS} == set(PLACE.levers)


@pytest.mark.parametrize("backend", [b for b in EVERY if b.diffusers_name], ids=lambda b: b.name)
def test_diffusers_wrappers_take_what_the_table_says(backend: Backend) -> None:
    """C45: an argument that is not in the signature would be dropped without a word."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    wrapper = registry._backends[AttentionBackendName(backend.diffusers_name)]
    names = set(inspect.signature(wrapper).parameters)
    assert "attn_mask" in names or not backend.mask
    assert "is_causal" in names or not backend.causal
    assert "return_lse" in names or not backend.lse
    assert "scale" in names or not backend.scale


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("backend", [b for b in BACKENDS.values() if "cpu" in b.devices], ids=lambda b: b.name)
def test_masks_are_obeyed(backend: Backend, additive: bool) -> None:
    """C45: a mask that hides half of the keys, through every wrapper that runs on this machine."""
    q, k, v = (x.transpose(1, 2) for x in tensors((1, 8, 10, 64)))  # [1, 10, 8, 64]
    mask = torch.zeros(1, 1, 1, 10, dtype=torch.bool)
    mask[..., ::2] = True
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    wanted, unmasked = (truth(*heads_first, m)[0].transpose(1, 2) for m in (mask, None))
    given = torch.where(mask, 0.0, -torch.inf) if additive else mask
    assert unfit_call(backend, q.shape, k.shape, q.dtype, "cpu", mask=True) is None
    member = AttentionBackendName(backend.diffusers_name)
    out = dispatch_attention(q, k, v, attn_mask=given, backend=member)
    assert torch.allclose(out.double(), wanted, atol=1e-5) and not torch.allclose(out.double(), unmasked, atol=0.1)


CALL = {"q_shape": (1, 256, 4, 64), "k_shape": (1, 256, 4, 64), "dtype": torch.float16, "device_type": "cuda"}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("flash", {}, None),
        ("flash", {"mask": True}, "takes no mask"),
        ("flash", {"dtype": torch.float32}, "the model is float32"),
        ("flash", {"device_type": "cpu"}, "the tensors are on cpu"),
        ("flash", {"q_shape": (1, 256, 4, 512), "k_shape": (1, 256, 4, 512)}, "at most 256, the model has 512"),
        ("cudnn", {"mask": True}, None),
        ("cudnn", {"q_shape": (1, 256, 4, 60), "k_shape": (1, 256, 4, 60)}, "multiples of 8"),
        ("cudnn", {"lse": True}, "no log-sum-exp"),
        ("xformers", {"mask": True}, "takes no mask"),
        ("native", {"mask": True, "causal": True, "gqa": True, "dtype": "float64"}, None),
        ("native", {"causal": True, "k_shape": (1, 77, 4, 64)}, "over more keys than queries"),
        ("flex", {"lse": True}, "no log-sum-exp"),
        ("1", {}, None),
        ("1", {"k_shape": (1, 77, 4, 64)}, "does not hide the tail of 77 keys"),
        ("1", {"k_shape": (1, 75_608, 4, 64)}, None),  # 40 of 75 600: below the error of 8 bits
        ("1", {"q_shape": (1, 256, 4, 80), "k_shape": (1, 256, 4, 80)}, "64, 96, 128, the model has 80"),
        ("1", {"lse": True}, "no log-sum-exp"),
        ("2", {"lse": True, "k_shape": (1, 77, 2, 64)}, None),
        ("2", {"dtype": torch.float32}, "float16 or bfloat16"),
        ("3", {"k_shape": (1, 256, 2, 64)}, "as many heads of keys"),
        ("3", {"causal": True}, "no causal"),
        ("triton", {"k_shape": (1, 77, 2, 64), "lse": True, "dtype": torch.float32}, None),
        ("triton", {"q_shape": (1, 256, 4, 160), "k_shape": (1, 256, 4, 160)}, "at most 128"),
        ("reference", {"device_type": "cpu", "q_shape": (1, 7, 4, 512), "k_shape": (1, 9, 4, 512)}, None),
        ("reference", {"device_type": "cpu", "mask": True}, "takes no mask"),
    ],
)
def test_calls(name: str, changes: dict[str, object], reason: str | None) -> None:
    backend = SAGE.get(name) or BACKENDS[name]
    found = unfit_call(backend, **(CALL | changes))  # type: ignore[arg-type]
    assert found is None if reason is None else found is not None and reason in found


def test_scale_that_a_kernel_cannot_take() -> None:
    from dataclasses import replace

    fixed = replace(SAGE["3"], scale=False)
    assert unfit_call(fixed, **CALL, scale=64**-0.5) is None  # type: ignore[arg-type]
    assert "scale" in (unfit_call(fixed, **CALL, scale=0.3) or "")  # type: ignore[arg-type]


def test_architectures() -> None:
    def why(name: str, hardware: str) -> str:
        return unfit(SAGE.get(name) or BACKENDS[name], HARDWARE[hardware], "bfloat16", 128) or ""

    assert "made for compute capability 9.0, b200 has 10.0" in why("flash3", "b200")
    assert "b200 has 10.0" in why("2", "b200") and "b200 has 10.0" in why("hub", "b200")
    assert "needs compute capability 10.0, 4090 has less" in why("3", "4090")
    assert why("cudnn", "4090") == why("triton", "b200") == ""
    assert "needs cuda, this is cpu" in why("triton", "cpu")


# ---- packages -------------------------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages that Python looks into first."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("attnkit", None)


PACKAGE = Package("attnkit", "attn_kit", "attn-kit", (2, 1), (3,), compiled="_attn")


def put(site: Path, version: str | None, *files: str) -> None:
    """Install a package of that version with these files; without a version only its module."""
    for name in ("attnkit/__init__.py", *files):
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text("raise RuntimeError('imported')" if name.endswith(".py") else "")
    if version is not None:
        info = site / f"attn_kit-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: attn_kit\nVersion: {version}\n")
        (info / "RECORD").write_text("".join(f"{name},,\n" for name in ("attnkit/__init__.py", *files)))


@pytest.mark.parametrize(
    ("version", "files", "reason"),
    [
        (None, (), "a module attnkit is there, but the package attn_kit is not installed"),
        ("1.9", (), "attn_kit 1.9 is installed, 2.1 or later is needed"),
        ("3.0.1", (), "attn_kit 3.0.1 is installed, one below 3 is needed"),
        ("2.2.0+cu128", (), "attn_kit 2.2.0+cu128 is not installed with its compiled kernels"),
        ("2.2.0.post1", ("attnkit/_attn_sm90.abi3.so",), None),
    ],
)
def test_packages_are_judged_without_importing_them(
    site: Path, version: str | None, files: tuple[str, ...], reason: str | None
) -> None:
    assert absent(PACKAGE) == "attn_kit is not installed (pip install attn-kit)"
    put(site, version, *files)
    assert absent(PACKAGE) == reason


def test_the_installed_sageattention_is_told_apart() -> None:
    pytest.importorskip("sageattention")
    from importlib.metadata import version

    one, two = SAGE["1"].package, SAGE["2"].package
    assert one is not None and two is not None
    if version("sageattention").startswith("1."):
        assert absent(one) is None and "2.1.1 or later is needed" in (absent(two) or "")
