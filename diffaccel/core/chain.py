"""The only file that touches diffusers' HookRegistry.

A `Link` is one hook of ours in one module's forward chain. It differs from a bare `register_hook` in what
happens later:

* It survives the removal of a hook below it. `HookRegistry.remove_hook` overwrites the next hook's
  `forward`; a hook with a `new_forward` is cut out by that. Ours define none: at rest `fn_ref.forward` *is*
  the body, and a skip swaps it for the length of one call.
* It is put back when another library drops it (accelerate's model offload restores `forward` at each run's end).
* It keeps a compiled body (`module.compile()`, `torch.compile(module)`) whole and inside.
* It leaves no `forward` in `vars(module)` when it goes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from threading import RLock, get_ident
from typing import Any

import torch

from ..errors import IncompatibleError
from .clock import CURRENT
from .compat import (
    COMPILED,
    OLD_FORWARD,
    REGISTRY,
    HookFunctionReference,
    HookRegistry,
    ModelHook,
    StateManager,
    host_edit,
    unwrap_module,
)

PREFIX = "diffaccel."
ROOT = PREFIX + "root"

Forward = Callable[..., Any]


class Hook(ModelHook):
    """Base of our hooks. Deep copies are refused: the copy's forward would run the original's weights."""

    had_forward = False  # see `_had_forward`

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise IncompatibleError(
            "copy.deepcopy of an accelerated model: the copy's hooks would run the original's weights. "
            "Call diffaccel.restore(pipe) first, copy, then accelerate both."
        )


class _AroundReference(HookFunctionReference):
    """A function reference whose `forward` is `around(self, ...)`; assigning to it replaces `body` only."""

    entry: Forward  # functools.partial(around, self)
    body: Forward

    @property
    def forward(self) -> Forward:
        return self.entry

    @forward.setter
    def forward(self, value: Forward) -> None:
        self.body = value

    @property
    def original_forward(self) -> Forward:
        return self.body

    @original_forward.setter
    def original_forward(self, value: Forward | None) -> None:
        if value is not None:
            self.body = value


class _CompiledBody:
    """Calls a module's compiled `__call__` with our wrapper out of the way, so that the graph stays as it was."""

    def __init__(self, module: torch.nn.Module, compiled: Forward, below: Forward) -> None:
        self.module, self.compiled, self.below = module, compiled, below

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attributes = vars(self.module)
        outer = attributes["forward"]
        if _is_own_forward(self.module, self.below):
            del attributes["forward"]
        else:
            attributes["forward"] = self.below
        try:
            return self.compiled(*args, **kwargs)
        finally:
            attributes["forward"] = outer


def _is_own_forward(module: torch.nn.Module, fn: Any) -> bool:
    return getattr(fn, "__self__", None) is module and getattr(fn, "__func__", None) is type(module).forward


def forward_chain(module: torch.nn.Module) -> Iterator[Any]:
    """The callables of a module's forward, outermost first (diffusers and accelerate both set `__wrapped__`)."""
    fn: Any = module.forward
    while fn is not None:
        yield fn
        fn = getattr(fn, "__wrapped__", None)


def compiled_body(module: torch.nn.Module) -> Forward | None:
    """The compiled `__call__` that `module.compile()` gave it, also where a hook of ours has taken it in."""
    found: Forward | None = vars(module).get(COMPILED)
    if found is not None:
        return found
    for ref in getattr(vars(module).get(REGISTRY), "_fn_refs", ()):
        body = ref.body if isinstance(ref, _AroundReference) else ref.forward
        if isinstance(body, _CompiledBody):
            return body.compiled
    return None


def _had_forward(module: torch.nn.Module) -> bool:
    """Did the module have a forward of its own in `vars` before the first hook of ours?

    Hooks of ours may go in another order than they came (a durable lever stays while the root hook comes anew above
    it): each inherits the answer of those that are there.
    """
    registry = vars(unwrap_module(module)).get(REGISTRY)
    ours = [hook for hook in getattr(registry, "hooks", {}).values() if isinstance(hook, Hook)]
    return ours[0].had_forward if ours else "forward" in vars(module)


class Link:
    """One hook of ours in the forward chain of one module. Create with `install`, end with `remove`."""

    def __init__(self, module: torch.nn.Module, hook: Hook, name: str, outermost: bool = False) -> None:
        self.module, self.hook, self.name, self.outermost = module, hook, name, outermost
        self.owner = unwrap_module(module)  # where attributes of a compiled module live
        self.had_forward = _had_forward(module)
        self.made_registry = REGISTRY not in vars(self.owner)
        self.compiled: Forward | None = None
        self.wrapper: Any = None
        self._register()

    @property
    def registry(self) -> HookRegistry:
        return HookRegistry.check_if_exists_or_initialize(self.owner)

    @property
    def body(self) -> Forward:
        """What runs below our hook."""
        ref = self.hook.fn_ref
        return ref.body if isinstance(ref, _AroundReference) else ref.forward

    def _register(self) -> None:
        registry = self.registry
        module_ref = registry._module_ref
        # A torch.compile'd module shares its registry with the module inside; wrap the compiled forward.
        registry._module_ref = self.module
        try:
            registry.register_hook(self.hook, self.name)
        finally:
            registry._module_ref = module_ref
        self.hook.had_forward = self.had_forward
        self.wrapper = self.module.forward
        self._absorb_compiled()

    def around(self, fn: Callable[..., Any]) -> Link:
        """Run every call as `fn(ref, *args, **kwargs)`, where `ref.body` is what runs below."""
        ref = self.hook.fn_ref
        body = ref.forward
        ref.__dict__.clear()  # the properties of the class below stand for `forward` and `original_forward`
        ref.pre_forward, ref.post_forward = self.hook.pre_forward, self.hook.post_forward
        ref.__class__ = _AroundReference
        ref.entry, ref.body = functools.partial(fn, ref), body
        return self

    def relink(self) -> None:
        """Put our wrapper back where another library dropped it, take in a body compiled since, move outermost."""
        current = self.module.forward
        if current is not self.wrapper:
            if not any(fn is self.wrapper for fn in forward_chain(self.module)):
                self._set_body(current)
                self.wrapper.__wrapped__ = current
                self.module.forward = self.wrapper
            elif self.outermost:
                self.remove()
                self.had_forward = _had_forward(self.module)
                self.made_registry = self.made_registry and REGISTRY not in vars(self.owner)
                self._register()
        self._absorb_compiled()

    def _set_body(self, body: Forward) -> None:
        self.hook.fn_ref.forward = body

    def _absorb_compiled(self) -> None:
        if self.module is not self.owner:
            return  # torch.compile(module): our wrapper already sits outside of it
        compiled = vars(self.module).get(COMPILED)
        if compiled is not None:
            self.compiled = compiled
            setattr(self.module, COMPILED, None)
        body = self.body
        if isinstance(body, _CompiledBody):
            if compiled is not None:
                body.compiled = compiled  # the user compiled it anew since
        elif self.compiled is not None:
            self._set_body(_CompiledBody(self.module, self.compiled, body))

    @host_edit
    def remove(self) -> None:
        """Take our hook out of the chain and the registry, wherever others stand around it."""
        body = self.body
        if isinstance(body, _CompiledBody):
            body = body.below
        if self.compiled is not None:
            setattr(self.module, COMPILED, self.compiled)
            self.compiled = None
        self._splice(body)
        registry = self.registry
        if self.name in registry.hooks:
            index = registry._hook_order.index(self.name)
            registry._hook_order.pop(index)
            registry._fn_refs.pop(index)
            del registry.hooks[self.name]
        if self.made_registry and not registry.hooks:
            delattr(self.owner, REGISTRY)

    def _splice(self, body: Forward) -> None:
        """Let whatever calls our wrapper call `body` instead."""
        for fn in forward_chain(self.module):
            if getattr(fn, "__wrapped__", None) is self.wrapper:
                fn.__wrapped__ = body
        if vars(self.owner).get(OLD_FORWARD) is self.wrapper:
            setattr(self.owner, OLD_FORWARD, body)
        for ref in self.registry._fn_refs:
            if ref is not self.hook.fn_ref:
                if ref.original_forward is self.wrapper:
                    ref.original_forward = body
                elif vars(ref).get("forward") is self.wrapper:
                    ref.forward = body
                elif isinstance(ref, _AroundReference) and ref.body is self.wrapper:
                    ref.body = body
        if self.module.forward is self.wrapper:
            if not self.had_forward and _is_own_forward(self.module, body):
                del self.module.forward
            else:
                self.module.forward = body


def install(module: torch.nn.Module, hook: Hook, name: str, outermost: bool = False) -> Link:
    """Put `hook` outermost into `module`'s forward chain under `diffaccel.NAME`. Raises if the name is taken."""
    full = name if name.startswith(PREFIX) else PREFIX + name
    registry = getattr(unwrap_module(module), REGISTRY, None)
    if registry is not None and full in registry.hooks:
        raise IncompatibleError(f"{type(module).__name__} already carries the hook {full!r}: restore it first")
    return Link(module, hook, full, outermost)


def around_forward(module: torch.nn.Module) -> list[tuple[Any, Any]]:
    """(before, after) of every hook in the module's registry, outermost first; (None, None) for one that replaces the
    forward. For code that does a module's work without calling it."""
    refs = reversed(getattr(vars(unwrap_module(module)).get(REGISTRY), "_fn_refs", ()))
    return [(None, None) if ref.original_forward is not None else (ref.pre_forward, ref.post_forward) for ref in refs]


def held_forwards(module: torch.nn.Module, function: Any) -> list[tuple[dict[str, Any], str]]:
    """(dict, key) of each place where hooks of diffusers, accelerate or ours hold `function` as its forward."""
    state = vars(module)
    refs = [vars(ref) for ref in getattr(state.get(REGISTRY), "_fn_refs", ())]
    places = [(state, "forward"), (state, OLD_FORWARD)]
    places += [(ref, key) for ref in refs for key in ("forward", "original_forward", "body")]

    def held(found: Any) -> bool:
        return getattr(found, "__self__", None) is module and getattr(found, "__func__", None) is function

    return [(where, key) for where, key in places if held(where.get(key))]


def stood_in_for(link: Link) -> bool:
    """Does a hook above `link` answer in the module's stead at present, so that what lies below will not run?"""
    refs = vars(link.owner)[REGISTRY]._fn_refs
    above = refs[refs.index(link.hook.fn_ref) + 1 :]
    if not above:
        return False
    chain: set[int] = set()
    fn: Any = link.module.forward  # as `forward_chain`, without calls: offload asks at every block
    while fn is not None:
        chain.add(id(fn))
        fn = getattr(fn, "__wrapped__", None)
    for ref in above:  # noqa: SIM110
        if id(ref.body if isinstance(ref, _AroundReference) else ref.forward) not in chain:
            return True
    return False


class _ContextProbe(StateManager):
    """Remembers the context a pipeline opened through `cache_context`, per thread; holds no other state."""

    def __init__(self) -> None:
        super().__init__(dict)
        self.by_thread: dict[int, Any] = {}  # pipelines in other threads may share the denoiser

    def set_context(self, context: Any) -> None:
        """Diffusers announces the context (None: closed)."""
        if context is None:
            self.by_thread.pop(get_ident(), None)
        else:
            self.by_thread[get_ident()] = context

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Diffusers resets caches at the end of a pipeline call."""
        self.by_thread.pop(get_ident(), None)


class RootHook(Hook):
    """One per denoiser: announces every call to the active run and to the levers that asked.

    A lock keeps the calls of one denoiser apart, since a skip is a short-lived edit of the module's chain.
    """

    _is_stateful = True

    def __init__(self, component: str, owner: Any) -> None:
        super().__init__()
        self.component = component
        self.owner = weakref.ref(owner)
        self.context = _ContextProbe()
        self.lock = RLock()
        self.listeners: list[Any] = []  # objects with begin_call(call, args, kwargs) and end_call(call)
        self.link: Link | None = None
        self.undo_all: Callable[[], None] = lambda: None

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        """Diffusers calls this at the end of a pipeline call; our state belongs to the run, not to the hook."""
        self.context.reset()
        return module

    def call(self, ref: _AroundReference, *args: Any, **kwargs: Any) -> Any:
        """The denoiser's forward, seen by the run of this thread (if any)."""
        run = CURRENT.get()
        with self.lock:
            if run is None or run.owner is not self.owner():
                return ref.body(*args, **kwargs)
            context = self.context.by_thread.get(get_ident())
            call = run.begin_call(self.component, None if context is None else context.name)
            if call.replay is not None:
                return call.replay
            begun, output = 0, None
            try:
                for listener in self.listeners:
                    begun += 1
                    listener.begin_call(call, args, kwargs)
                    if call.inputs is not None:
                        args, kwargs = call.inputs
                output = call.output = ref.body(*args, **kwargs) if call.answer is None else call.answer
                if call.finish is not None:
                    output = call.finish(output)
            finally:
                for listener in self.listeners[:begun]:
                    listener.end_call(call)
                call.inputs = call.answer = call.finish = call.output = None
            run.end_call(call, output)
            return output


@host_edit
def install_root(module: torch.nn.Module, component: str, owner: Any) -> RootHook:
    """Install the root hook of a denoiser for `owner` (an `Acceleration`).

    A hook left behind by a pipeline that was garbage-collected without `restore` is cleared away first;
    a living owner is a refusal.
    """
    registry = getattr(unwrap_module(module), REGISTRY, None)
    other = registry.hooks.get(ROOT) if registry is not None else None
    if other is not None:
        holder = other.owner()
        if holder is not None and holder is not owner and holder.alive():
            raise IncompatibleError(
                f"{component} ({type(unwrap_module(module)).__name__}) is shared with a pipeline that is already "
                f"accelerated ({holder.describe()}). Restore that one first, or accelerate only one of them: the "
                "other runs plain and exact."
            )
        other.undo_all()
    hook = RootHook(component, owner)
    hook.link = install(module, hook, ROOT).around(hook.call)
    invalidate(module)
    return hook


def invalidate(module: torch.nn.Module) -> None:
    """Make diffusers look again for hooks below `module` (it keeps a list once a cache context was opened)."""
    registry = getattr(unwrap_module(module), REGISTRY, None)
    if registry is not None:
        registry.invalidate_child_registries_cache()
