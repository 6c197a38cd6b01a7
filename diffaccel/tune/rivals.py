"""What a tuned schedule has to beat at equal evaluations: the plain pipeline with fewer steps, by several schedulers.

"own" is the pipeline's scheduler on its own grid of fewer steps; "euler" and "unipc" are swapped in as a user would,
with the noise levels' shift taken over. One that cannot run in this pipeline is left out with its reason.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

RIVALS = ("own", "euler", "unipc")


def is_flow(scheduler: Any) -> bool:
    """Does this scheduler step a flow (velocities over noise levels from 1 to 0)?"""
    config = scheduler.config
    return "FlowMatch" in type(scheduler).__name__ or config.get("prediction_type") == "flow_prediction"


def schedulers(scheduler: Any) -> dict[str, Callable[[], Any]]:
    """Name -> how to make it; those of the pipeline's own class are "own" alone."""
    import diffusers

    config, flow = scheduler.config, is_flow(scheduler)
    shift = {"shift": config["flow_shift"]} if "flow_shift" in config else {}
    flow_shift = {"flow_shift": config["shift"]} if "shift" in config else {}
    unipc = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", **flow_shift} if flow else {}
    euler = diffusers.FlowMatchEulerDiscreteScheduler if flow else diffusers.EulerDiscreteScheduler
    made: dict[str, tuple[Any, dict[str, Any]]] = {
        "euler": (euler, shift if flow else {}),
        "unipc": (diffusers.UniPCMultistepScheduler, unipc),
    }
    others = {
        name: functools.partial(_make, cls, {**config, **more})
        for name, (cls, more) in made.items()
        if cls is not type(scheduler)
    }
    return {"own": lambda: scheduler, **others}


def _make(cls: Any, config: Mapping[str, Any]) -> Any:
    """A scheduler of this class with what it knows of another's settings."""
    known = inspect.signature(cls.__init__).parameters
    return cls.from_config({name: value for name, value in config.items() if name in known})


@contextmanager
def scheduled(pipe: Any, scheduler: Any) -> Iterator[None]:
    """The pipeline with another scheduler, for the length of the `with`."""
    before = vars(pipe)["scheduler"]
    vars(pipe)["scheduler"] = scheduler
    try:
        yield
    finally:
        vars(pipe)["scheduler"] = before
