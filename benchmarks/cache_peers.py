"""The peers: diffusers' own caches and cache-dit, each at several settings, enabled as their documentation says.

A peer is run on a fresh pipeline per setting, because what they leave behind after `disable` is not always plain
(tests/reported/test_faults_of_cache_dit.py). Thresholds and schedules were chosen for this testbed so that each peer
has settings at or just below 14 and 9 computed steps of 28. The schedules of diffusers' TaylorSeer with `after` are
the best of all its intervals and limits by the surrogate of search_schedule.py.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cache_calibrate import Context, even_steps
from cache_settings import searched_mask

REFUSALS = (ValueError, TypeError, AttributeError, LookupError, RuntimeError, AssertionError, ImportError)


@dataclass(frozen=True)
class Peer:
    """One setting of one method of one library."""

    name: str
    library: str
    method: str
    enable: Callable[[Any, Context], None]
    adaptive: bool
    our_schedule: bool = False  # steps as our search placed them; not counted as the peer's own result
    kinds: tuple[str, ...] = ("image", "video")
    steps: tuple[int, ...] = ()  # step counts it is for; empty: any


def versions() -> dict[str, str]:
    """Installed versions, or "not installed"."""
    found = {}
    for library in ("diffusers", "cache-dit"):
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            found[library] = "not installed"
    return found


# ---- diffusers -----------------------------------------------------------------------------------------------------


def native(config: str, **options: Any) -> Callable[[Any, Context], None]:
    """`transformer.enable_cache(diffusers.CONFIG(**options))`."""

    def enable(pipe: Any, context: Context) -> None:
        import diffusers

        made = dict(options)
        if config == "MagCacheConfig":
            made |= {"num_inference_steps": context.steps, "mag_ratios": context.magnitude_ratios}
        pipe.transformer.enable_cache(getattr(diffusers, config)(**made))

    return enable


def _first_block(threshold: float) -> Peer:
    enable = native("FirstBlockCacheConfig", threshold=threshold)
    return Peer(f"native-first_block-{threshold:g}", "diffusers", "first_block", enable, True)


def _taylorseer(
    interval: int, before: int, order: int, after: int | None = None, lite: bool = True, dtype: str = "float32"
) -> Peer:
    def enable(pipe: Any, context: Context) -> None:
        import torch

        native(
            "TaylorSeerCacheConfig",
            cache_interval=interval,
            disable_cache_before_step=before,
            disable_cache_after_step=after,
            max_order=order,
            use_lite_mode=lite,
            taylor_factors_dtype=getattr(torch, dtype),
        )(pipe, context)

    name = f"native-taylorseer{'-lite' if lite else ''}-n{interval}e{before}o{order}"
    name += "" if after is None else f"-after{after}"
    name += "" if dtype == "float32" else f"-{dtype}"
    steps = () if after is None else (28,)
    return Peer(name, "diffusers", "taylorseer-lite" if lite else "taylorseer", enable, False, steps=steps)


def _magcache(threshold: float, most: int, retention: float = 0.2) -> Peer:
    options = {"threshold": threshold, "max_skip_steps": most, "retention_ratio": retention}
    name = f"native-magcache-{threshold:g}k{most}r{retention:g}"
    return Peer(name, "diffusers", "magcache", native("MagCacheConfig", **options), False)


def _seacache(threshold: float, order: int, most: int) -> Peer:
    options = {"threshold": threshold, "residual_order": order, "max_consecutive_cached": most}
    name = f"native-seacache-{threshold:g}o{order}c{most}"
    return Peer(name, "diffusers", "seacache", native("SeaCacheConfig", **options), True)


# ---- cache-dit -----------------------------------------------------------------------------------------------------


def dit(order: int | None = None, mask: str | Callable[[Context], Sequence[int]] | None = None, **options: Any) -> Any:
    """`cache_dit.enable_cache(pipe, DBCacheConfig(**options), TaylorSeerCalibratorConfig(order))`.

    `mask` is a policy of `cache_dit.steps_mask`, or a function to flags (1 = compute).
    """

    def enable(pipe: Any, context: Context) -> None:
        import cache_dit

        made = dict(options)
        if isinstance(mask, str):
            made["steps_computation_mask"] = cache_dit.steps_mask(total_steps=context.steps, mask_policy=mask)
        elif mask is not None:
            made["steps_computation_mask"] = list(mask(context))
        forecast = None if order is None else cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=order)
        cache_dit.enable_cache(pipe, cache_config=cache_dit.DBCacheConfig(**made), calibrator_config=forecast)

    return enable


def _dbcache(
    front: int, warmup: int, threshold: float, order: int | None = None, back: int = 0, most: int = -1
) -> Peer:
    name = f"cache-dit-F{front}B{back}W{warmup}R{threshold:g}" + (f"MC{most}" if most > 0 else "")
    name += "" if order is None else f"-taylor{order}"
    enable = dit(
        order,
        Fn_compute_blocks=front,
        Bn_compute_blocks=back,
        max_warmup_steps=warmup,
        residual_diff_threshold=threshold,
        max_continuous_cached_steps=most,
    )
    return Peer(name, "cache-dit", "dbcache" if order is None else f"dbcache-taylor{order}", enable, True)


def _masked(policy: str, order: int | None) -> Peer:
    name = f"cache-dit-scm-{policy}" + ("" if order is None else f"-taylor{order}")
    static = {"Fn_compute_blocks": 1, "steps_computation_policy": "static"}
    method = "scm" if order is None else f"scm-taylor{order}"
    return Peer(name, "cache-dit", method, dit(order, policy, **static), False)


def _even(computed: int, first: int, order: int | None) -> Peer:
    """cache-dit with a steps mask: a few computed steps, then evenly spaced ones; the counts are for 28 steps."""

    def flags(context: Context) -> list[int]:
        return even_steps(context.steps, round(computed * context.steps / 28), first)

    static = {"Fn_compute_blocks": 1, "steps_computation_policy": "static"}
    name = f"cache-dit-mask-{computed}-first{first}" + ("" if order is None else f"-taylor{order}")
    method = "mask" if order is None else f"mask-taylor{order}"
    return Peer(name, "cache-dit", method, dit(order, flags, **static), False)


def _our_mask(computed: int, order: int) -> Peer:
    """cache-dit with the steps that our search found for our own predictor."""

    def flags(context: Context) -> list[int]:
        return [int(flag) for flag in searched_mask(context.train.kind, computed)]

    static = {"Fn_compute_blocks": 1, "steps_computation_policy": "static"}
    name = f"cache-dit-our-mask-{computed}-taylor{order}"
    return Peer(name, "cache-dit", "our-mask", dit(order, flags, **static), False, our_schedule=True, steps=(28,))


# ---- the table -----------------------------------------------------------------------------------------------------

PEERS: tuple[Peer, ...] = (
    *(_first_block(t) for t in (0.1, 0.12, 0.2)),
    *(_taylorseer(n, e, o) for n, e, o in ((2, 1, 1), (2, 3, 1), (3, 3, 1), (4, 3, 1), (4, 2, 1))),
    *(_taylorseer(*row) for row in ((3, 1, 2, 22), (3, 3, 1, 24), (4, 1, 2, 26))),
    _taylorseer(3, 3, 1, lite=False),
    *(_magcache(*row) for row in ((0.12, 4), (0.3, 8))),
    _seacache(0.25, 1, 2),
    *(_dbcache(1, 4, t) for t in (0.14, 0.28)),
    *(_dbcache(1, 4, t, 1) for t in (0.14, 0.2, 0.28)),
    _dbcache(4, 4, 0.14, 1),
    _masked("fast", 1),
    *(_even(*row) for row in ((14, 1, 1), (14, 3, 1), (14, 3, 2), (9, 1, 1), (9, 3, 1), (9, 3, 2))),
    *(_our_mask(k, o) for k in (14, 9) for o in (1, 2)),
)
