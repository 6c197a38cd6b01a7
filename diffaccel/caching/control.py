"""Control networks beside a cache: their conditions are watched, and their work is put off until it is wanted.

A control network runs before the denoiser, in every step, and only a denoiser that is computed looks at what it says.
So it is put off: its call gets stand-ins of the right form (they take no memory), and when the denoiser's call turns
out to be computed, the network runs after all and its output takes their place. A reused step so leaves it out, with
any gate, and nothing is guessed. Where a pipeline changes what the network said before the denoiser is given it, or
another lever changes the denoiser's arguments, the network runs in every step as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..core.chain import AroundReference, Hook, Link, install
from ..core.clock import CURRENT
from ..core.compat import leaves, unwrap_module
from ..core.listener import Listener
from ..core.place import Rank
from ..core.root import RootHook
from ..core.run import Call, Run
from ..core.state import PerRun
from ..errors import IncompatibleError
from ..models.controls import CONDITIONS, NETWORK_CONDITIONS, ONCE, networks
from ..models.spec import ModelSpec
from .conditions import Kept, changed, holds_tensors, scaled_processors, told_of

EXPLAINED = frozenset((*ONCE, *CONDITIONS))  # arguments with tensors of which is known what they are
CHANGES, SKIPPED, CALLED, NETWORKS = "changes", "skipped", "called", "networks"


class _Network(Hook):
    """One control network of the pipeline, and what of it is known in the run in progress."""

    def __init__(self, control: Control, name: str, module: torch.nn.Module) -> None:
        super().__init__()
        self.control, self.name = control, name
        self.names = list(inspect.signature(type(unwrap_module(module)).forward).parameters)[1:]
        self.clear()

    def clear(self) -> None:
        """Forget the run."""
        self.run: Run | None = None
        self.form: tuple[Any, ...] | None = None  # of its arguments, when what it said was handed on as it was
        self.make: Callable[[], Any] | None = None  # stand-ins for what it says, once it is known to be handed on
        self.made: Callable[[], Any] | None = None  # the same, before that is known
        self.put_off: Callable[[], Any] | None = None
        self.stand_ins: list[torch.Tensor] = []
        self.said: list[torch.Tensor] | None = None  # by this step's call; None while it is put off
        self.at: tuple[int, int] | None = None  # (loop, step) of its latest call
        self.heard = True  # whether the denoiser was called since
        self.single = True  # whether the denoiser is called before every next call of this network

    def call(self, ref: AroundReference, *args: Any, **kwargs: Any) -> Any:
        """The network's forward, run now or put off."""
        run = CURRENT.get()
        if run is None or not self.control.watches(run):
            return ref.body(*args, **kwargs)
        return self.control.network_call(self, run, ref.body, args, kwargs)


def _form(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in leaves((args, dict(kwargs)))[0])


def _maker(output: Any) -> Callable[[], Any]:
    """Makes stand-ins for a network's output: tensors of its form that take no memory. Nothing may compute with them;
    where something did, it would show."""
    tensors, rebuild = leaves(output)
    forms = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]

    def make() -> Any:
        empty = [torch.full((), float("nan"), dtype=dtype, device=device) for _, dtype, device in forms]
        return rebuild([tensor.expand(shape) for tensor, (shape, _, _) in zip(empty, forms, strict=True)])

    return make


class _Deliver(Listener):
    """Told of each call of a denoiser after the engine has decided."""

    def __init__(self, control: Control, spec: ModelSpec) -> None:
        self.control, self.outside = control, spec.stand_down

    def begin_call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The denoiser is about to run, or has been answered for."""
        if self.control.state in call.run.state:
            self.control.deliver(call, args, kwargs, self.outside)


class Control:
    """What the engines of one cache ask about conditions, in one run at a time.

    Its memory lies in the run (`PerRun`), so that a snapshot takes it along; what concerns a single step lies here.
    """

    def __init__(self, name: str, components: Mapping[str, Any], rank: Rank) -> None:
        self.state = f"{name}.conditions"
        self.roots: list[RootHook] = []
        self.scales: dict[str, list[Any]] = {}
        self.links: list[Link] = []
        self.networks: list[_Network] = []
        self.stop: list[Callable[[], None]] = []
        try:
            for component in networks(components):
                if isinstance(components[component], torch.nn.Module):
                    self._hook(component, components[component], rank)
        except BaseException:
            self.undo()
            raise

    def _hook(self, component: str, module: torch.nn.Module, rank: Rank) -> None:
        hooks = getattr(getattr(unwrap_module(module), "_diffusers_hook", None), "hooks", {})
        number = next(n for n in range(len(hooks) + 1) if f"diffaccel.control.{n}" not in hooks)  # it may be shared
        hook = _Network(self, component, module)
        self.links.append(install(module, hook, f"control.{number}", rank=rank).around(hook.call))
        self.networks.append(hook)

    def listen(self, root: RootHook, spec: ModelSpec, rank: Rank) -> None:
        """Give computed calls of this denoiser what networks say; told after the engine, which comes first."""
        self.roots.append(root)
        self.stop.append(root.add(_Deliver(self, spec), rank))

    # ---- conditions ------------------------------------------------------------------------------------

    def watches(self, run: Run) -> bool:
        """Is the cache at work in this run (and not a paused one that is being replayed)?"""
        return self.state in run.state and not (run.replay is not None and run.replay.pending)

    def stamp(self, call: Call, kwargs: Mapping[str, Any], spec: ModelSpec) -> int:
        """A number that grows when any condition of this branch has changed in this run, or one of a network."""
        state = call.run.state.get(self.state)
        if state is None:
            return 0
        told = told_of(kwargs, spec.stand_down)
        scales = self.scales.get(call.component)
        if scales:
            told["scales"] = tuple([tuple(one.scale) for one in scales])
        key = (call.component, call.branch)
        if told or key in state:
            self._compare(state, key, told)
        changes: int = state.get((CHANGES, key), 0) + state.get((CHANGES, NETWORKS), 0)
        return changes + call.run.edits

    def _compare(self, state: PerRun, key: tuple[str, str], told: Mapping[str, Any]) -> None:
        before, now = state.get(key), Kept(told)
        state[key] = now
        if before is not None and changed(before, now):
            who = (CHANGES, key if key[1] else NETWORKS)
            state[who] = state.get(who, 0) + 1

    def unexplained(self, call: Call, kwargs: Mapping[str, Any], spec: ModelSpec) -> str | None:
        """The name of an argument with tensors that act on blocks and come from nobody that is watched, or None."""
        for name in spec.stand_down:
            if name not in EXPLAINED and holds_tensors(kwargs.get(name)) and not self._spoke(call):
                return name
        return None

    def _spoke(self, call: Call) -> bool:
        return any(one.run is call.run and one.at == (call.loop, call.step) for one in self.networks)

    # ---- networks --------------------------------------------------------------------------------------

    def network_call(
        self, one: _Network, run: Run, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The pipeline calls a control network."""
        state = run.state[self.state]
        given = dict(zip(one.names, args, strict=False)) | kwargs
        told = {name: given[name] for name in NETWORK_CONDITIONS if name in given}
        self._compare(state, (one.name, ""), told)
        self._close(one)
        if not one.heard:
            one.single, one.make = False, None
        one.run, one.at, one.heard = run, (run.loop, run.step), False
        state[CALLED] = state.get(CALLED, 0) + 1
        form = _form(args, kwargs)
        if one.make is not None and form == one.form and self._may_wait():
            output = one.make()
            one.put_off, one.said = (lambda: body(*args, **kwargs)), None
            one.stand_ins = leaves(output)[0]
            return output
        output = body(*args, **kwargs)
        one.form, one.make, one.made, one.said = form, None, _maker(output), leaves(output)[0]
        return output

    def _may_wait(self) -> bool:
        rewrites = any(listener.rewrites for root in self.roots for listener in root.listeners)
        return not rewrites and not torch.is_grad_enabled()

    def _close(self, one: _Network) -> None:
        """What is put off and was never asked for has been left out."""
        if one.put_off is not None and one.run is not None and self.state in one.run.state:
            state = one.run.state[self.state]
            state[SKIPPED] = state.get(SKIPPED, 0) + 1
        one.put_off, one.stand_ins, one.said = None, [], None

    def deliver(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], outside: Sequence[str]) -> None:
        """The denoiser is called. Where it will be computed, let networks that were put off run, and hand on what they
        say."""
        for one in self.networks:
            if one.run is not call.run:
                continue
            one.heard = True
            if call.answer is not None:
                continue
            if one.stand_ins:
                kwargs = self._hand_on(one, kwargs, outside)
                call.inputs = args, kwargs
            elif one.said is not None:
                self._learn(one, kwargs, outside)

    def _hand_on(self, one: _Network, kwargs: dict[str, Any], outside: Sequence[str]) -> dict[str, Any]:
        if one.put_off is not None:
            run_now, one.put_off = one.put_off, None
            one.said = leaves(run_now())[0]
        assert one.said is not None
        real = {id(stand_in): tensor for stand_in, tensor in zip(one.stand_ins, one.said, strict=True)}
        found, filled = set(), dict(kwargs)
        for name in outside:
            tensors, rebuild = leaves(kwargs.get(name))
            if any(id(tensor) in real for tensor in tensors):
                found |= {id(tensor) for tensor in tensors}
                filled[name] = rebuild([real.get(id(tensor), tensor) for tensor in tensors])
        if not found.issuperset(real):
            raise IncompatibleError(
                f"{one.name}: its output was changed on the way to the denoiser, unlike in the steps before; take the "
                "cache off (pipe.disable_cache()) for such a call"
            )
        return filled

    def _learn(self, one: _Network, kwargs: Mapping[str, Any], outside: Sequence[str]) -> None:
        """Is what the network said handed on as it is? Then it can be put off from the next step on."""
        assert one.said is not None
        given = {id(tensor) for name in outside for tensor in leaves(kwargs.get(name))[0]}
        if one.single and one.said and given.issuperset(id(tensor) for tensor in one.said):
            one.make = one.made

    # ---- life ------------------------------------------------------------------------------------------

    def begin_run(self, run: Run, denoisers: Mapping[str, torch.nn.Module]) -> None:
        """State for this run."""
        run.state[self.state] = PerRun()
        self.scales = {name: scaled_processors(module) for name, module in denoisers.items()}

    def end_run(self, run: Run) -> None:
        """Forget it."""
        for one in self.networks:
            if one.run is run:
                self._close(one)
                one.clear()

    def stats(self, run: Run) -> dict[str, object]:
        """How many calls of control networks were left out."""
        state = run.state.get(self.state, PerRun())
        waiting = sum(one.run is run and one.put_off is not None for one in self.networks)
        called = state.get(CALLED, 0)
        return {"control_skipped": f"{state.get(SKIPPED, 0) + waiting} of {called}"} if called else {}

    def relink(self) -> None:
        """Put back hooks that others dropped."""
        for link in self.links:
            link.relink()

    def undo(self) -> None:
        """Leave the networks as they were found."""
        for stop in self.stop:
            stop()
        for link in reversed(self.links):
            link.remove()
        self.stop, self.links = [], []
