"""What a placement will take, of the device and of the host, before anything moves. Plain numbers.

Weights are known to the byte; what computing takes beside them (activations, workspaces) is an allowance per moment
that the caller gives. `choose_placement` picks the fastest placement that fits, or refuses with the least possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...errors import BudgetError

MOMENTS = ("encode", "denoise", "decode")
GIB = 1024**3
CHUNK_BYTES = 16 << 20  # a transfer from disk holds this much beside what it fills


@dataclass(frozen=True)
class Component:
    """What moves as one: a component (or several that share weights).

    `stage` is one of MOMENTS, or "always" for what stays on the device. Parts of one stage are in together, but
    `alternates` (the experts of a denoiser that take turns) are in one at a time.
    """

    name: str
    stage: str
    size_bytes: int
    alternates: bool = False


@dataclass(frozen=True)
class Placement:
    """Where the components that are not at work are kept: on the "device" (nothing moves), the "host" or on "disk".

    `in_turn`: only one part is in at a time, though encoders then move once for each prompt.
    """

    store: str
    in_turn: bool = False


@dataclass(frozen=True)
class Peak:
    """Predicted peaks in bytes. On a CPU, whose memory is the host's, the host holds what is kept beside it as well.

    `attach_host_bytes` is the most the host holds while weights that were loaded to it are put away the first time.
    `moments` is the device's peak of each moment.
    """

    device_bytes: int
    host_bytes: int
    attach_host_bytes: int
    moments: Mapping[str, int] = field(default_factory=dict)

    @property
    def worst(self) -> str:
        """The moment with the highest peak."""
        return max(self.moments, key=lambda moment: self.moments[moment])


def total_bytes(components: Iterable[Component]) -> int:
    """All weights."""
    return sum(part.size_bytes for part in components)


def weights_by_moment(components: Iterable[Component], placement: Placement) -> dict[str, int]:
    """The most weight bytes on the device in each moment.

    A decoder may be called among the encoders (image-to-image); it then comes alone, which its own moment covers.
    """
    components = list(components)
    if placement.store == "device":
        return dict.fromkeys(MOMENTS, total_bytes(components))
    stays = sum(part.size_bytes for part in components if part.stage == "always")
    found = {}
    for moment in MOMENTS:
        mine = [part for part in components if part.stage == moment]
        one = max((part.size_bytes for part in mine if part.alternates), default=0)
        rest = [part.size_bytes for part in mine if not part.alternates]
        # What stands by the denoiser (a ControlNet) works in every step: taking turns would move it each time.
        together = sum(rest) if moment == "denoise" or not placement.in_turn else max(rest, default=0)
        found[moment] = stays + one + together
    return found


def predict_peak(
    components: Iterable[Component],
    placement: Placement,
    compute: str,
    activation_bytes: Mapping[str, int] | int = 0,
    kept_bytes: int = 0,
) -> Peak:
    """Peaks of a run. `compute` is the device's type ("cpu", "cuda"); `kept_bytes` what the host keeps beside
    weights (embeddings); `activation_bytes` the allowance for computing, one number or one per moment."""
    components = list(components)
    whole = total_bytes(components)
    allowance = activation_bytes if isinstance(activation_bytes, Mapping) else dict.fromkeys(MOMENTS, activation_bytes)
    moments = {m: b + allowance.get(m, 0) for m, b in weights_by_moment(components, placement).items()}
    device = max(moments.values(), default=0)
    chunk = CHUNK_BYTES if placement.store == "disk" else 0
    # While weights that lie on the host are put away, the one part that moves is there twice (a file is read back).
    twice = whole + max((part.size_bytes for part in components), default=0) if placement.store != "device" else whole
    if compute == "cpu":
        return Peak(device, device + kept_bytes, twice, moments)
    moved = sum(part.size_bytes for part in components if part.stage != "always")
    held = {"device": 0, "host": moved, "disk": chunk}[placement.store] + kept_bytes
    return Peak(device, held, twice, moments)


def choose_placement(
    components: Iterable[Component],
    compute: str,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    activation_bytes: Mapping[str, int] | int = 0,
    kept_bytes: int = 0,
    stores: Iterable[str] = ("host", "disk"),
    turns: Iterable[bool] = (False, True),
) -> tuple[Placement, Peak]:
    """The first of the placements (faster ones first) whose peaks are within both limits (None: no limit).

    Raises:
        BudgetError: none is; says the least possible of the limit that is broken.
    """
    components = list(components)
    tried: list[tuple[Placement, Peak]] = []
    for turn in turns:
        for store in stores:
            placement = Placement(store, turn)
            peak = predict_peak(components, placement, compute, activation_bytes, kept_bytes)
            tried.append((placement, peak))
            if _within(peak.device_bytes, device_bytes) and _within(peak.host_bytes, host_bytes):
                return placement, peak
    raise BudgetError(_least(tried, device_bytes, host_bytes))


def _within(need: int, limit: int | None) -> bool:
    return limit is None or need <= limit


def _least(tried: list[tuple[Placement, Peak]], device_bytes: int | None, host_bytes: int | None) -> str:
    placement, peak = min(tried, key=lambda pair: pair[1].device_bytes)
    if not _within(peak.device_bytes, device_bytes):
        assert device_bytes is not None
        return (
            f"{gib(device_bytes)} of the device are allowed, but the least possible with stages is "
            f"{gib(peak.device_bytes)} (in {peak.worst}; store={placement.store!r}, in_turn={placement.in_turn})"
        )
    assert host_bytes is not None
    fitting = [pair for pair in tried if _within(pair[1].device_bytes, device_bytes)]
    placement, peak = min(fitting, key=lambda pair: pair[1].host_bytes)
    return (
        f"{gib(host_bytes)} of host memory are allowed, but the least possible is {gib(peak.host_bytes)} "
        f"(store={placement.store!r}, in_turn={placement.in_turn})"
    )


def gib(count_bytes: int) -> str:
    """Bytes for people."""
    if count_bytes < GIB // 100:
        return f"{count_bytes / 1024**2:.2f} MiB"
    return f"{count_bytes / GIB:.2f} GiB"
