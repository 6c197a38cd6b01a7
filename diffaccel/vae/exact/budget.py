"""Which mode and strip height an exact decode takes, within a budget of bytes; and what size a call will decode."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ...core.modular import call_arguments, is_modular
from ...errors import BudgetError
from ..layout import compression

if TYPE_CHECKING:
    from ...core.protocols import Pipeline

MIB = 2**20
SMALLEST = 8  # latents along a side: a budget that does not even do for this is refused when it is asked for


class Limits(Protocol):
    """What was asked for: mode ("auto", "fast", "low"), rows per strip and bytes at most (None: no limit)."""

    @property
    def mode(self) -> str:
        """ "auto", "fast" or "low"."""

    @property
    def rows(self) -> int | None:
        """Latent rows of a strip."""

    @property
    def max_bytes(self) -> int | None:
        """Bytes of live tensors."""


@dataclass(frozen=True)
class Choice:
    """How one decode or encode is cut, and the peak of live bytes predicted for it."""

    mode: str
    rows: int
    bytes: int


def choose_strips(
    limits: Limits, backend: Any, vae: Any, shape: tuple[int, ...], itemsize: int, *, encode: bool = False
) -> Choice:
    """The fastest choice within `limits.max_bytes` for z (or pictures) of `shape`; without a budget the fastest.

    Raises:
        BudgetError: none fits; names the least possible.
    """
    least: Choice | None = None
    for mode, rows in _candidates(limits, backend, vae, shape, encode):
        size = backend.peak_bytes(vae, shape, rows=rows, mode=mode, itemsize=itemsize, encode=encode)
        if limits.max_bytes is None or size <= limits.max_bytes:
            return Choice(mode, rows, size)
        if least is None or size < least.bytes:
            least = Choice(mode, rows, size)
    assert least is not None and limits.max_bytes is not None
    asked = limits.mode not in ("auto", backend.MODES[-1])
    raise BudgetError(
        f"max_bytes={limits.max_bytes}: to {'encode' if encode else 'decode'} {size_in_words(vae, shape, encode)} "
        f"takes at least {least.bytes} bytes ({least.bytes / MIB:.1f} MiB, mode={least.mode!r}, rows={least.rows})"
        + (f"; mode={limits.mode!r} was asked for" if asked else "")
    )


def _candidates(
    limits: Limits, backend: Any, vae: Any, shape: tuple[int, ...], encode: bool
) -> Iterator[tuple[str, int]]:
    """(mode, rows), likely fastest first."""
    for mode in backend.MODES if limits.mode == "auto" else (limits.mode,):
        rows = limits.rows or backend.default_rows(vae, shape, encode=encode)
        yield mode, rows
        while limits.rows is None and rows > 1:
            rows //= 2
            yield mode, rows


def smallest(vae: Any) -> tuple[int, ...]:
    """Shape of the latents of a small picture (one frame)."""
    return _latent_shape(vae, SMALLEST, SMALLEST, 1)


def size_in_words(vae: Any, shape: tuple[int, ...], encode: bool = False) -> str:
    """`1024x1024 px` of latents (or pictures) of a shape."""
    ratio = 1 if encode else compression(vae)
    frames = f", {shape[2]} {'' if encode else 'latent '}frames" if len(shape) == 5 and shape[2] > 1 else ""
    count = f"{shape[0]} pictures of " if shape[0] > 1 else ""
    return f"{count}{shape[-1] * ratio}x{shape[-2] * ratio} px{frames}"


def expected(pipe: Pipeline, vae: Any, request: Any) -> tuple[int, ...] | None:
    """Shape of the latents that a call of the pipeline will decode at once; None where it cannot be told.

    Args:
        request: ((call, pipe), args, kwargs) of the call, or None for a call with no arguments.
    """
    if request is None or is_modular(pipe):
        arguments: dict[str, Any] = call_arguments(pipe) | ({} if request is None else request[2])
    else:
        (call, caller), args, kwargs = request
        bound = inspect.signature(call).bind_partial(caller, *args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
    if arguments.get("output_type") == "latent":
        return None
    side = getattr(pipe, "default_sample_size", None)
    factor = getattr(pipe, "vae_scale_factor", None)
    own = (
        side * factor if isinstance(side, int) and isinstance(factor, int) and arguments.get("image") is None else None
    )
    height, width = (arguments[name] if isinstance(arguments.get(name), int) else own for name in ("height", "width"))
    if height is None or width is None:
        return None
    ratio = compression(vae)
    frames = arguments.get("num_frames")
    shape = _latent_shape(vae, -(-height // ratio), -(-width // ratio), frames if isinstance(frames, int) else 1)
    return (1 if getattr(vae, "use_slicing", False) else _batch(arguments), *shape[1:])


def _batch(arguments: Mapping[str, Any]) -> int:
    """How many pictures a call makes: its prompts times the pictures for each."""
    prompt, embeds = arguments.get("prompt"), arguments.get("prompt_embeds")
    if isinstance(prompt, (list, tuple)):
        prompts = len(prompt)
    else:
        prompts = embeds.shape[0] if prompt is None and embeds is not None else 1
    each = arguments.get("num_images_per_prompt", arguments.get("num_videos_per_prompt", 1))
    return max(1, prompts) * (each if isinstance(each, int) and each > 0 else 1)


def _latent_shape(vae: Any, height: int, width: int, frames: int) -> tuple[int, ...]:
    config = getattr(vae, "config", None)
    channels = getattr(config, "latent_channels", None) or getattr(config, "z_dim", None) or 4
    kernel = next((p for p in vae.parameters() if p.dim() in (4, 5)), None)
    if kernel is None or kernel.dim() == 4:
        return 1, channels, height, width
    step = next(
        (v for n in ("temporal_compression_ratio", "scale_factor_temporal") for v in (_number(vae, n),) if v), 1
    )
    return 1, channels, (frames - 1) // step + 1, height, width


def _number(vae: Any, name: str) -> int | None:
    value = vars(vae).get(name, getattr(getattr(vae, "config", None), name, None))
    return value if isinstance(value, int) and value > 0 else None
