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
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch

from ..errors import IncompatibleError
from .compat import (
    COMPILED,
    OLD_FORWARD,
    REGISTRY,
    Argument,
    Forward,
    HookFunctionReference,
    HookPair,
    HookRegistry,
    ModelHook,
    Output,
    Wrapper,
    host_edit,
    unwrap_module,
)
from .place import LAST, Rank
from .wrappers import attributes_of, in_a_graph, is_compiled, wrappers

PREFIX = "diffaccel."


class Hook(ModelHook):
    """Base of our hooks. Deep copies are refused: the copy's forward would run the original's weights."""

    link: Link | None = None  # set by `install`

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise IncompatibleError(
            "copy.deepcopy of an accelerated model: the copy's hooks would run the original's weights. "
            "Call diffaccel.restore(pipe) first, copy, then accelerate both."
        )


class AroundReference(HookFunctionReference):
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

    def __call__(self, *args: Argument, **kwargs: Argument) -> Output:
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


def _is_own_forward(module: torch.nn.Module, fn: object) -> bool:
    return getattr(fn, "__self__", None) is module and getattr(fn, "__func__", None) is type(module).forward


def forward_chain(module: torch.nn.Module) -> Iterator[Wrapper]:
    """The callables of a module's forward, outermost first (diffusers and accelerate both set `__wrapped__`)."""
    fn: Wrapper = module.forward
    while fn is not None:
        yield fn
        fn = getattr(fn, "__wrapped__", None)


def compiled_body(module: torch.nn.Module) -> Forward | None:
    """The compiled `__call__` that `module.compile()` gave it, also where a hook of ours has taken it in."""
    found: Forward | None = vars(module).get(COMPILED)
    if found is not None:
        return found
    for ref in getattr(vars(module).get(REGISTRY), "_fn_refs", ()):
        body = ref.body if isinstance(ref, AroundReference) else ref.forward
        if isinstance(body, _CompiledBody):
            return body.compiled
    return None


def whole_in_graph(module: torch.nn.Module) -> bool:
    """Is the model compiled as a whole, by `torch.compile(module)` or by `module.compile()` of it or of a wrapper?"""
    model = unwrap_module(module)
    return in_a_graph(module) or any(compiled_body(one) is not None for one in (*wrappers(module), model))


def _ours(module: torch.nn.Module) -> list[Link]:
    """Our links on a module, innermost first. (A module and its torch.compile'd form share a registry.)"""
    return [link for link in _of_registry(module) if link.module is module]


def _of_registry(module: torch.nn.Module) -> list[Link]:
    registry = vars(unwrap_module(module)).get(REGISTRY)
    hooks = getattr(registry, "hooks", {})
    found = [hooks[name] for name in getattr(registry, "_hook_order", ())]
    return [hook.link for hook in found if isinstance(hook, Hook) and hook.link is not None]


class Link:
    """One hook of ours in the forward chain of one module. Create with `install`, end with `remove`.

    Links come and go in any order: of two on one module the one of the smaller `rank` lies deeper, whichever came
    first. What the module looked like before the first of them is handed on from each to the next.
    """

    def __init__(
        self, module: torch.nn.Module, hook: Hook, name: str, outermost: bool = False, rank: Rank = LAST
    ) -> None:
        self.module, self.hook, self.name, self.outermost, self.rank = module, hook, name, outermost, rank
        self.owner = unwrap_module(module)  # whose registry it is; wrappers forward to it, and have none of their own
        others, all_ours = _ours(module), _of_registry(module)
        self.had_forward: bool = others[0].had_forward if others else "forward" in vars(module)
        self.made_registry: bool = all_ours[0].made_registry if all_ours else REGISTRY not in vars(self.owner)
        self.wrapper: Wrapper = None
        self._around: Forward | None = None
        hook.link = self
        self._register()

    @property
    def registry(self) -> HookRegistry:
        return HookRegistry.check_if_exists_or_initialize(self.owner)

    @property
    def body(self) -> Forward:
        """What runs below our hook."""
        ref = self.hook.fn_ref
        return ref.body if isinstance(ref, AroundReference) else ref.forward

    def _register(self) -> None:
        """Take our place in the chain: outside of what is there, but inside of links of a larger rank."""
        registry, module = self.registry, self.module
        above = next((link for link in _ours(module) if link is not self and link.rank > self.rank), None)
        if above is not None:
            above.relink()  # it may have been dropped since the last run
        outside = module.forward
        module_ref = registry._module_ref
        # A torch.compile'd module shares its registry with the module inside; wrap the compiled forward.
        registry._module_ref = module
        try:
            if above is not None:
                module.forward = above.plain_body
            registry.register_hook(self.hook, self.name)
        except BaseException:
            module.forward = outside
            raise
        finally:
            registry._module_ref = module_ref
        self.wrapper = module.forward
        if above is not None:
            module.forward = outside
            above._set_body(self.wrapper)
            at = registry._hook_order.index(above.name)
            registry._hook_order.insert(at, registry._hook_order.pop())
            registry._fn_refs.insert(at, registry._fn_refs.pop())
        settle_compiled(module)

    @property
    def plain_body(self) -> Forward:
        """What runs below our hook, uncompiled."""
        body = self.body
        return body.below if isinstance(body, _CompiledBody) else body

    def around(self, fn: Forward) -> Link:
        """Run every call as `fn(ref, *args, **kwargs)`, where `ref.body` is what runs below."""
        ref = self.hook.fn_ref
        body = ref.forward
        ref.__dict__.clear()  # the properties of the class below stand for `forward` and `original_forward`
        ref.pre_forward, ref.post_forward = self.hook.pre_forward, self.hook.post_forward
        ref.__class__ = AroundReference
        ref.entry, ref.body, self._around = functools.partial(fn, ref), body, fn
        return self

    def relink(self) -> None:
        """Put our wrapper back where another library dropped it, take in a body compiled since, move outermost."""
        current = self.module.forward
        if current is not self.wrapper:
            chain = list(forward_chain(self.module))
            if not any(fn is self.wrapper for fn in chain):
                self._set_body(current)
                self.module.forward = self.wrapper
            elif self.outermost and not self._below_ours(chain):
                self.remove()
                self.made_registry = self.made_registry and REGISTRY not in vars(self.owner)
                self.hook.link = self
                self._register()
                if self._around is not None:
                    self.around(self._around)
        if vars(self.module).get(COMPILED) is not None:
            settle_compiled(self.module)

    def _below_ours(self, chain: list[Wrapper]) -> bool:
        """Is all that lies above our wrapper ours as well?"""
        ours = [link.wrapper for link in _ours(self.module)]
        at = next(i for i, fn in enumerate(chain) if fn is self.wrapper)
        return all(any(fn is wrapper for wrapper in ours) for fn in chain[:at])

    def _set_body(self, body: Forward) -> None:
        old = self.body
        if isinstance(old, _CompiledBody) and not isinstance(body, _CompiledBody):
            self.hook.fn_ref.forward = _CompiledBody(self.module, old.compiled, body)
        else:
            self.hook.fn_ref.forward = body
        self.wrapper.__wrapped__ = self.plain_body

    @host_edit
    def remove(self) -> None:
        """Take our hook out of the chain and the registry, wherever others stand around it."""
        compiled = self.body.compiled if isinstance(self.body, _CompiledBody) else None
        self._splice(self.plain_body)
        registry = self.registry
        if self.name in registry.hooks:
            index = registry._hook_order.index(self.name)
            registry._hook_order.pop(index)
            registry._fn_refs.pop(index)
            del registry.hooks[self.name]
        self.hook.link = None
        if compiled is not None and vars(self.module).get(COMPILED) is None:
            setattr(self.module, COMPILED, compiled)
        settle_compiled(self.module)
        if self.made_registry and not registry.hooks:
            delattr(self.owner, REGISTRY)

    def _splice(self, body: Forward) -> None:
        """Let whatever calls our wrapper call `body` instead."""
        for fn in forward_chain(self.module):
            if getattr(fn, "__wrapped__", None) is self.wrapper:
                fn.__wrapped__ = body
        holder = attributes_of(self.module)
        if vars(holder).get(OLD_FORWARD) is self.wrapper:
            setattr(holder, OLD_FORWARD, body)
        for ref in self.registry._fn_refs:
            if ref is not self.hook.fn_ref:
                if ref.original_forward is self.wrapper:
                    ref.original_forward = body
                elif vars(ref).get("forward") is self.wrapper:
                    ref.forward = body
                elif isinstance(ref, AroundReference) and ref.body is self.wrapper:
                    ref.body = body
        if self.module.forward is self.wrapper:
            if not self.had_forward and _is_own_forward(self.module, body):
                del self.module.forward
            else:
                self.module.forward = body


# ---- compiled bodies -----------------------------------------------------------------------------------------------


def settle_compiled(module: torch.nn.Module) -> None:
    """A compiled `__call__` belongs inside of all our hooks: it lies in the body of the innermost, or, where there is
    none, on the module. Whoever compiled last is in force."""
    if is_compiled(module):
        return  # torch.compile(module): our wrappers sit outside of it
    links = _ours(module)
    compiled = compiled_body(module)
    for link in links:
        if isinstance(link.body, _CompiledBody):
            link.hook.fn_ref.forward = link.plain_body
    if compiled is None or not links:
        return
    links[0].hook.fn_ref.forward = _CompiledBody(module, compiled, links[0].body)
    setattr(module, COMPILED, None)


def set_compiled(module: torch.nn.Module, compiled: Forward) -> Callable[[], None]:
    """Let a module run as `compiled` (of its `_call_impl`), inside of our hooks. Returns the undo, which leaves alone
    what somebody else compiled since."""
    had = COMPILED in vars(module)  # None stays behind where a compiled body was taken off
    vars(module)[COMPILED] = compiled
    settle_compiled(module)

    def undo() -> None:
        if compiled_body(module) is not compiled:
            return
        for link in _ours(module):
            if isinstance(link.body, _CompiledBody):
                link.hook.fn_ref.forward = link.plain_body
        if had:
            vars(module)[COMPILED] = None
        else:
            vars(module).pop(COMPILED, None)

    return undo


def install(module: torch.nn.Module, hook: Hook, name: str, outermost: bool = False, rank: Rank = LAST) -> Link:
    """Put `hook` into `module`'s forward chain under `diffaccel.NAME`: outside of all but links of a larger rank.

    `outermost` moves it out again where another library has put a hook of its own around it since. Raises if the name
    is taken.
    """
    full = name if name.startswith(PREFIX) else PREFIX + name
    registry = getattr(unwrap_module(module), REGISTRY, None)
    if registry is not None and full in registry.hooks:
        raise IncompatibleError(f"{type(module).__name__} already carries the hook {full!r}: restore it first")
    return Link(module, hook, full, outermost, rank)


def around_forward(module: torch.nn.Module) -> list[HookPair]:
    """(before, after) of every hook in the module's registry, outermost first; (None, None) for one that replaces the
    forward. For code that does a module's work without calling it."""
    refs = reversed(getattr(vars(unwrap_module(module)).get(REGISTRY), "_fn_refs", ()))
    return [(None, None) if ref.original_forward is not None else (ref.pre_forward, ref.post_forward) for ref in refs]


def held_forwards(module: torch.nn.Module, function: object) -> list[tuple[dict[str, object], str]]:
    """(dict, key) of each place where hooks of diffusers, accelerate or ours hold `function` as its forward."""
    state = vars(module)
    refs = [vars(ref) for ref in getattr(state.get(REGISTRY), "_fn_refs", ())]
    places = [(state, "forward"), (state, OLD_FORWARD)]
    places += [(ref, key) for ref in refs for key in ("forward", "original_forward", "body")]

    def held(found: object) -> bool:
        return getattr(found, "__self__", None) is module and getattr(found, "__func__", None) is function

    return [(where, key) for where, key in places if held(where.get(key))]


def stood_in_for(link: Link) -> bool:
    """Does a hook above `link` answer in the module's stead at present, so that what lies below will not run?"""
    refs = vars(link.owner)[REGISTRY]._fn_refs
    above = refs[refs.index(link.hook.fn_ref) + 1 :]
    if not above:
        return False
    chain: set[int] = set()
    fn: Wrapper = link.module.forward  # as `forward_chain`, without calls: offload asks at every block
    while fn is not None:
        chain.add(id(fn))
        fn = getattr(fn, "__wrapped__", None)
    for ref in above:  # noqa: SIM110
        if id(ref.body if isinstance(ref, AroundReference) else ref.forward) not in chain:
            return True
    return False
