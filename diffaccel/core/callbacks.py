"""The user's step callbacks: outside of the run, but what they exchange is seen."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback

from .run import Run, suspended

if TYPE_CHECKING:
    from .compat import Argument, Forward, Kwargs, Output

CALLBACK_OBJECTS = (MultiPipelineCallbacks, PipelineCallback)
CALLBACKS = ("callback_on_step_end", "callback")  # the second is the older one of the Stable Diffusion pipelines
LATENTS = "latents"  # what a callback may change without changing what the picture is of


def own_callbacks(run: Run, kwargs: Kwargs) -> Kwargs:
    """The call's arguments, with the user's callbacks outside of the run: what they call is not the run's."""
    wrapped = dict(kwargs)
    for name in CALLBACKS:
        callback = kwargs.get(name)
        if callback is None:
            continue
        outside = _outside(run, callback)
        # Some pipelines ask a callback object of diffusers for the tensors it wants; they must still see one.
        wrapped[name] = _CallbackObject(callback, outside) if isinstance(callback, CALLBACK_OBJECTS) else outside
    return wrapped


class _CallbackObject(MultiPipelineCallbacks):
    """A callback object of diffusers (its `tensor_inputs` are those of the object inside) that calls `outside`."""

    def __init__(self, inside: PipelineCallback, outside: Forward) -> None:
        super().__init__([inside])
        self.outside = outside

    def __call__(self, *args: Argument, **kwargs: Argument) -> Output:
        return self.outside(*args, **kwargs)


def _outside(run: Run, callback: Forward) -> Forward:
    @functools.wraps(callback)
    def outside(*args: Argument, **kwargs: Argument) -> Output:
        if run.replay is not None and run.replay.covers(run):
            return {}  # a replayed step, which the callback has seen before the pause
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, dict)), {})
        before = {name: (value, version_of(value)) for name, value in given.items() if isinstance(value, torch.Tensor)}
        with suspended():
            answer = callback(*args, **kwargs)
        if isinstance(answer, dict):
            run.edits += exchanged(before, answer)
        return answer

    return outside


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written into (inference tensors do not count: 0)."""
    return 0 if tensor.is_inference() else tensor._version


def exchanged(before: dict[str, tuple[torch.Tensor, int]], after: Kwargs) -> bool:
    """Is a tensor that a callback hands back, other than the latents, another one of the same form, or written into?

    One of another form (half of the prompt's embeddings, where guidance ends) makes another call of the denoiser,
    which is told apart by its form.
    """
    for name, (tensor, version) in before.items():
        now = after.get(name)
        if name == LATENTS or not isinstance(now, torch.Tensor) or now.shape != tensor.shape:
            continue
        if now is not tensor or version_of(now) != version:
            return True
    return False
