"""Step caches: gates, predictors, guards and scopes, and the engine that runs any combination of them.

from diffaccel.caching import Forecast, Guards, ProbeGate, Stack
pipe.enable_cache(gate=ProbeGate(0.1), predictor=Forecast(order=1), guard=Guards(warmup_steps=4), scope=Stack(1))
"""

from .gates.adacache import RatesGate
from .gates.base import Gate, ProbeGate
from .gates.easycache import ProbeAligned, ProbeSumGate, RateGate
from .gates.magcache import MagnitudeGate
from .gates.seacache import SpectralGate
from .gates.teacache import PolynomialGate, TimePolynomialGate
from .guards import Guards
from .predictors import Forecast
from .schedule import ScheduleGate
from .scopes.config import Deep, Denoiser, Halves, Modules, Stack

__all__ = [
    "Deep",
    "Denoiser",
    "Forecast",
    "Gate",
    "Guards",
    "Halves",
    "MagnitudeGate",
    "Modules",
    "PolynomialGate",
    "ProbeAligned",
    "ProbeGate",
    "ProbeSumGate",
    "RateGate",
    "RatesGate",
    "ScheduleGate",
    "SpectralGate",
    "Stack",
    "TimePolynomialGate",
]
