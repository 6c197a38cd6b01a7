"""Step caches: gates, predictors, guards and scopes, and the engine that runs any combination of them.

from diffaccel.caching import Forecast, Guards, ProbeGate, Stack
pipe.enable_cache(gate=ProbeGate(0.1), predictor=Forecast(order=1), guard=Guards(warmup_steps=4), scope=Stack(1))
"""

from .adaptive import RatesGate
from .gates import Gate, ProbeGate
from .guards import Guards
from .magnitude import MagnitudeGate
from .polynomial import PolynomialGate, TimePolynomialGate
from .predictors import Forecast
from .probing import ProbeAligned, ProbeSumGate, RateGate
from .schedule import ScheduleGate
from .scopes import Deep, Denoiser, Halves, Modules, Stack
from .spectral import SpectralGate

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
