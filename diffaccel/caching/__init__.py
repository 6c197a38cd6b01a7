"""Step caches: gates, predictors, guards and scopes, and the engine that runs any combination of them.

from diffaccel.caching import Forecast, Guards, ProbeGate, Stack
pipe.enable_cache(gate=ProbeGate(0.1), predictor=Forecast(order=1), guard=Guards(warmup_steps=4), scope=Stack(1))

The names below are imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..extrapolation.forecast import Forecast as Forecast
    from .gates.adacache import RatesGate as RatesGate
    from .gates.base import Gate as Gate
    from .gates.base import ProbeGate as ProbeGate
    from .gates.dicache import ProbeAligned as ProbeAligned
    from .gates.dicache import ProbeSumGate as ProbeSumGate
    from .gates.easycache import RateGate as RateGate
    from .gates.magcache import MagnitudeGate as MagnitudeGate
    from .gates.schedule import ScheduleGate as ScheduleGate
    from .gates.seacache import SpectralGate as SpectralGate
    from .gates.teacache import PolynomialGate as PolynomialGate
    from .gates.teacache import TimePolynomialGate as TimePolynomialGate
    from .guards import Guards as Guards
    from .scopes.denoiser import Denoiser as Denoiser
    from .scopes.halves import Halves as Halves
    from .scopes.modules import Modules as Modules
    from .scopes.stack import Stack as Stack
    from .scopes.unet import Deep as Deep

WHERE = {
    "Deep": ".scopes.unet",
    "Denoiser": ".scopes.denoiser",
    "Forecast": "..extrapolation.forecast",
    "Gate": ".gates.base",
    "Guards": ".guards",
    "Halves": ".scopes.halves",
    "MagnitudeGate": ".gates.magcache",
    "Modules": ".scopes.modules",
    "PolynomialGate": ".gates.teacache",
    "ProbeAligned": ".gates.dicache",
    "ProbeGate": ".gates.base",
    "ProbeSumGate": ".gates.dicache",
    "RateGate": ".gates.easycache",
    "RatesGate": ".gates.adacache",
    "ScheduleGate": ".gates.schedule",
    "SpectralGate": ".gates.seacache",
    "Stack": ".scopes.stack",
    "TimePolynomialGate": ".gates.teacache",
}

__all__ = [*WHERE]


def __getattr__(name: str) -> Any:
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(WHERE[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *WHERE})
