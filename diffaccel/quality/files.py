"""Pictures and videos from files, as 8-bit RGB: [H, W, 3] of a picture, [F, H, W, 3] of a video.

A picture is whatever Pillow reads; one that moves (GIF, animated WebP or PNG) is a video. A folder is a video too:
its pictures are the frames, in the natural order of their names (frame 2 before frame 10), everything else in it is
passed over. Other videos (mp4, webm, ...) are decoded by the optional package imageio.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InvalidOptionError, MissingDependencyError

FRAMES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})  # what is a frame in a folder
VIDEOS = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"})
_DECODERS = {"imageio_ffmpeg": "FFMPEG", "av": "pyav"}  # module that imageio needs -> what it calls the plugin
_DEEP_MODES = ("I", "F")  # Pillow's modes of more than 8 bits begin so; converted to RGB they would be clipped


def read(path: str | os.PathLike[str]) -> np.ndarray:
    """The picture or video at `path`. Raises `InvalidOptionError` where there is none that can be read, and
    `MissingDependencyError` with the install line where a video needs a package."""
    place = Path(path)
    if place.is_dir():
        return _folder(place)
    if not place.is_file():
        raise InvalidOptionError(f"cannot compare {str(place)!r}: there is no such file or folder")
    if place.suffix.lower() in VIDEOS:
        return _video(place)
    return _picture(place)


def pixels(image: Any, name: str = "a picture") -> np.ndarray:
    """A PIL image as uint8 [H, W, 3]."""
    if image.mode.startswith(_DEEP_MODES):
        raise InvalidOptionError(
            f"cannot compare {name} of Pillow's mode {image.mode!r}: it has more than 8 bits a pixel; "
            "give it as an array of floats in 0..1"
        )
    return np.array(image.convert("RGB"))


def _folder(place: Path) -> np.ndarray:
    names = [entry.name for entry in place.iterdir() if entry.suffix.lower() in FRAMES and entry.is_file()]
    frames = [_picture(place / name) for name in sorted(names, key=_natural)]
    if not frames:
        raise InvalidOptionError(f"cannot compare {str(place)!r}: the folder holds no pictures")
    shapes = sorted({frame.shape for frame in frames})
    if len(shapes) > 1 or len(shapes[0]) != 3:
        found = " and ".join(str(list(shape)) for shape in shapes)
        raise InvalidOptionError(
            f"cannot compare {str(place)!r}: the frames in a folder must be still pictures of one size, got {found}"
        )
    return np.stack(frames)


def _picture(place: Path) -> np.ndarray:
    from PIL import Image, ImageSequence

    try:
        with Image.open(place) as image:
            frames = [pixels(frame, repr(str(place))) for frame in ImageSequence.Iterator(image)]
            return np.stack(frames) if getattr(image, "is_animated", False) else frames[0]
    except (OSError, SyntaxError) as error:  # Pillow's word for a broken PNG
        raise InvalidOptionError(f"cannot compare {str(place)!r}: Pillow cannot read it ({error})") from error


def _video(place: Path) -> np.ndarray:
    plugin = next((name for module, name in _DECODERS.items() if importlib.util.find_spec(module)), None)
    if plugin is None or importlib.util.find_spec("imageio") is None:
        raise MissingDependencyError(
            f"reading {str(place)!r} needs imageio with its video decoder, which is not installed: "
            'pip install "imageio[ffmpeg]" (or give a folder of frames)'
        )
    try:
        return np.stack(list(importlib.import_module("imageio.v3").imiter(place, plugin=plugin)))
    except (OSError, ValueError, IndexError) as error:
        raise InvalidOptionError(f"cannot compare {str(place)!r}: imageio cannot decode it ({error})") from error


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key by which frame2 comes before frame10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
