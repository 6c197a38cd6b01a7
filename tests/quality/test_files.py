"""Pictures and videos read from files: the same numbers as from memory, and refusals that say why."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffaccel.errors import InvalidOptionError, MissingDependencyError
from diffaccel.quality import compare, files, mse

METRICS = ("psnr", "ssim", "mse", "max_error")
FRAMES = np.random.default_rng(0).integers(0, 256, (12, 16, 24, 3), dtype=np.uint8)  # [F, H, W, 3]
OTHER = torch.rand(12, 3, 16, 24, generator=torch.Generator().manual_seed(1))


def save_frames(folder: Path, frames: np.ndarray = FRAMES) -> Path:
    """A folder with the frames as frame0.png, frame1.png, ..., frame10.png."""
    folder.mkdir(exist_ok=True)
    for index, frame in enumerate(frames):
        Image.fromarray(frame).save(folder / f"frame{index}.png")
    return folder


def gray(level: int) -> np.ndarray:
    """A picture of one level."""
    return np.full((16, 24, 3), level, np.uint8)


def test_a_picture_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    Image.fromarray(FRAMES[0]).save(path)
    expected = compare(FRAMES[0], OTHER[0], METRICS)
    for form in (path, str(path), [path], [str(path)]):
        assert compare(form, OTHER[0], METRICS) == expected
        assert compare(OTHER[0], form, METRICS) == compare(OTHER[0], FRAMES[0], METRICS)
    assert compare(path, FRAMES[1], METRICS) != expected  # the comparison is not blind


def test_the_error_between_two_files_has_a_closed_form(tmp_path: Path) -> None:
    for name, level in (("black", 0), ("dark", 51), ("white", 255)):
        Image.fromarray(gray(level)).save(tmp_path / f"{name}.png")
    black, dark, white = (tmp_path / f"{name}.png" for name in ("black", "dark", "white"))
    assert mse(black, white) == 1
    assert mse(black, dark) == pytest.approx(0.2**2)
    assert mse([black, black], [dark, white]) == pytest.approx((0.2**2 + 1) / 2)
    assert compare(dark, dark)["psnr"] == float("inf")


def test_a_folder_is_a_video_in_natural_order(tmp_path: Path) -> None:
    folder = save_frames(tmp_path / "video")
    (folder / "notes.txt").write_text("passed over")
    (folder / "more").mkdir()
    assert np.array_equal(files.read(folder), FRAMES)  # frame2 comes before frame10
    alphabetical = sorted(range(12), key=str)
    assert not np.array_equal(files.read(folder), FRAMES[alphabetical])
    expected = compare(FRAMES, OTHER, METRICS)
    for form in (OTHER, OTHER[None], OTHER.movedim(1, -1), OTHER.movedim(1, -1).numpy()):
        assert compare(folder, form, METRICS) == expected
    assert compare([folder, folder], torch.stack([OTHER, OTHER]), METRICS) == pytest.approx(expected)
    with pytest.raises(InvalidOptionError, match="shape"):
        compare(folder, OTHER[:11], METRICS)


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".png"])
def test_a_picture_that_moves_is_a_video(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"moving{suffix}"
    first, *rest = (Image.fromarray(gray(level)) for level in (0, 102, 255))
    first.save(path, save_all=True, append_images=rest, lossless=True)
    assert files.read(path).shape == (3, 16, 24, 3)
    assert mse(path, torch.zeros(3, 3, 16, 24)) == pytest.approx((0 + 0.4**2 + 1) / 3)
    assert mse(path, [gray(0), gray(102), gray(255)]) == 0


def test_refusals(tmp_path: Path) -> None:
    """What cannot be read is refused with its name and the reason."""
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty").mkdir()
    Image.fromarray(FRAMES[0]).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:200])
    mixed = save_frames(tmp_path / "mixed", FRAMES[:2])
    Image.fromarray(FRAMES[0][:8]).save(mixed / "smaller.png")
    Image.new("I;16", (24, 16)).save(tmp_path / "deep.png")
    said = {
        "missing.png": "no such file or folder",
        "text.png": "Pillow cannot read it",
        "cut.png": "Pillow cannot read it",
        "empty": "holds no pictures",
        "mixed": r"one size, got \[8, 24, 3\] and \[16, 24, 3\]",
        "deep.png": "more than 8 bits",
    }
    for name, reason in said.items():
        with pytest.raises(InvalidOptionError, match=f"cannot compare .*{name}.*{reason}"):
            compare(tmp_path / name, FRAMES[0])


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make packages look uninstalled."""
    real: Callable[..., object] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in names else real(name, *more))


@pytest.mark.parametrize("hidden", [("imageio",), ("imageio_ffmpeg", "av")])
def test_a_video_without_its_package_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: tuple[str, ...]
) -> None:
    path = tmp_path / "film.MP4"
    path.write_bytes(b"")
    hide(monkeypatch, *hidden)
    with pytest.raises(MissingDependencyError, match=r'film\.MP4.*pip install "imageio\[ffmpeg\]".*folder'):
        compare(path, path)
    with pytest.raises(ImportError):
        mse(path, path)


STAND_IN = """
import numpy, pathlib

def imiter(path, *, plugin):
    assert plugin == "FFMPEG"
    if pathlib.Path(path).stat().st_size == 0:
        raise OSError("no frames")
    for level in (0, 102, 255):
        yield numpy.full((16, 24, 3), level, numpy.uint8)
"""


def test_a_video_through_imageio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package: its frames are what is compared, and its complaint is passed on."""
    packages = tmp_path / "packages"
    for name, text in (("imageio/__init__", ""), ("imageio/v3", STAND_IN), ("imageio_ffmpeg/__init__", "")):
        target = packages / f"{name}.py"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    monkeypatch.syspath_prepend(packages)
    for name in ("imageio", "imageio.v3", "imageio_ffmpeg"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    film, empty = tmp_path / "film.mp4", tmp_path / "empty.mp4"
    film.write_bytes(b"film")
    empty.write_bytes(b"")
    assert mse(film, torch.zeros(1, 3, 3, 16, 24)) == pytest.approx((0 + 0.4**2 + 1) / 3)
    with pytest.raises(InvalidOptionError, match=r"empty\.mp4.*no frames"):
        mse(empty, empty)
    for name in ("imageio", "imageio.v3", "imageio_ffmpeg"):
        sys.modules.pop(name, None)


def test_a_video_through_the_real_imageio(tmp_path: Path) -> None:
    iio = pytest.importorskip("imageio.v3", reason="imageio is not installed")
    pytest.importorskip("imageio_ffmpeg", reason="imageio-ffmpeg is not installed")
    path = tmp_path / "film.mp4"
    frames = np.stack([np.full((64, 64, 3), level, np.uint8) for level in (20, 120, 220)])
    iio.imwrite(path, frames, fps=8, plugin="FFMPEG")
    assert files.read(path).shape == frames.shape
    assert compare(path, frames)["psnr"] > 30 > compare(path, frames[::-1])["psnr"]
    path.write_bytes(b"no film")
    with pytest.raises(InvalidOptionError, match=r"film\.mp4"):
        compare(path, path)
