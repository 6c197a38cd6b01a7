"""Previews as a self-contained HTML page: pictures as data in the page, no script, nothing fetched."""

from __future__ import annotations

import base64
import html
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from ..quality.metrics import as_batch
from .preview import first_of

if TYPE_CHECKING:
    from .seeds import Scouting

STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em}.g{display:flex;flex-wrap:wrap;gap:12px}"
    "figure{margin:0;width:200px}img{width:200px;image-rendering:auto;border:1px solid #ccc}figcaption{color:#444}"
)


def picture_of(value: Any) -> Any:
    """Any form of a picture as a PIL image; of a video its middle frame."""
    from PIL import Image

    pixels = as_batch(value)[0]
    pixels = pixels[len(pixels) // 2] if pixels.ndim == 4 else pixels
    pixels = pixels[:3] if pixels.shape[0] >= 3 else pixels[:1].expand(3, -1, -1)
    array = (pixels.clamp(0, 1).movedim(0, -1).cpu().numpy() * 255).round().astype(np.uint8)
    return Image.fromarray(array)


def data_of(value: Any) -> str:
    """A picture as the source of an <img>."""
    file = io.BytesIO()
    picture_of(value).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def grid(scouting: Scouting) -> str:
    """All candidates by prompt, as a piece of HTML."""
    parts: list[str] = []
    last = None
    for one in scouting.candidates:
        if one.prompt != last:
            parts += ["</div>"] * (last is not None) + [f"<h3>{html.escape(one.prompt)}</h3><div class='g'>"]
            last = one.prompt
        shown = one.preview if one.output is None else first_of(one.output)
        image = "" if shown is None else f"<img alt='candidate {one.index}' src='{data_of(shown)}'>"
        state = "finished" if one.output is not None else f"after {scouting.until_step} steps"
        parts.append(f"<figure>{image}<figcaption>{one.index}: seed {one.seed}, {state}</figcaption></figure>")
    return "".join(parts) + ("</div>" if last is not None else "")


def html_page(scouting: Scouting, title: str) -> str:
    """The whole page."""
    said = f"{len(scouting.candidates)} candidates, {scouting.computed} denoiser calls computed"
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1><p>{said}</p>{grid(scouting)}</body></html>\n"
    )
