"""Pictures for a page: PNG bytes in the page itself; of a video its first, middle and last frame side by side."""

from __future__ import annotations

import base64
import io

import numpy as np

from ..quality.differences import difference

SIDE = 192  # pixels of the longer side on the page; larger pictures are made smaller
SHOWN = 3  # frames of a video


def sheet(picture: np.ndarray) -> np.ndarray:
    """[H, W, C] as it is, [F, H, W, C] as [H, 3 W, C]; values that are no numbers black."""
    if picture.ndim == 4:
        last = len(picture) - 1
        picture = np.concatenate([picture[round(i * last / (SHOWN - 1))] for i in range(SHOWN)], axis=1)
    return np.nan_to_num(np.asarray(picture, dtype=np.float32), posinf=1.0)


def data_uri(picture: np.ndarray) -> str:
    """A picture [H, W, C] or video [F, H, W, C] in 0..1 as the address of an <img>."""
    from PIL import Image

    values = (sheet(picture).clip(0, 1) * 255).round().astype(np.uint8)
    image = Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values[..., :3]).convert("RGB")
    longer = max(image.size)
    if longer > SIDE * (SHOWN if picture.ndim == 4 else 1):
        image.thumbnail((SIDE * (SHOWN if picture.ndim == 4 else 1), SIDE))
    memory = io.BytesIO()
    image.save(memory, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(memory.getvalue()).decode("ascii")


def apart(plain: np.ndarray, ours: np.ndarray) -> tuple[np.ndarray, float]:
    """(difference pictures [P, ..., H, W, C], their gain), one gain for all prompts."""
    shown, gain = difference(np.nan_to_num(plain), np.nan_to_num(ours))
    return shown.movedim(-3, -1).numpy(), gain
