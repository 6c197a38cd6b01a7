"""The hook layer: removal in any order, hooks that others drop, compiled bodies, and no trace afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook as AccelerateHook
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry, ModelHook

from diffaccel.core.chain import Hook, install
from diffaccel.errors import IncompatibleError


class Plus(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds one."""
        return x + 1


class Lower(ModelHook):
    """A native hook that counts and, like most of diffusers' own, replaces the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.fn_ref.original_forward(*args, **kwargs)


class Ours(Hook):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self.calls += 1
        return output * 10


X = torch.tensor(1.0)


def test_install_and_remove_leave_no_trace() -> None:
    module = Plus()
    before = dict(vars(module))
    hook = Ours()
    link = install(module, hook, "test")
    assert module(X) == 20 and hook.calls == 1
    link.remove()
    assert vars(module) == before and module(X) == 2


def test_around_can_skip_the_body() -> None:
    module = Plus()
    link = install(module, Ours(), "test").around(lambda ref, *args: torch.tensor(5.0))
    assert module(X) == 50
    link.remove()
    assert module(X) == 2 and "forward" not in vars(module)


@pytest.mark.parametrize("around", [False, True])
def test_native_removal_of_a_lower_hook_keeps_ours(around: bool) -> None:
    """X1: `HookRegistry.remove_hook` cuts the next hook out of the chain when that one has a new_forward."""
    module, hook, lower = Plus(), Ours(), Lower()
    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(lower, "lower")
    link = install(module, hook, "test")
    if around:
        link.around(lambda ref, *args: ref.body(*args) + 1)
    registry.remove_hook("lower")
    assert module(X) == (30 if around else 20)
    assert hook.calls == 1 and lower.calls == 0
    link.remove()
    assert module(X) == 2


def test_a_native_hook_with_new_forward_is_cut_by_the_same_removal() -> None:
    """Negative control: the fault is there in the installed diffusers, for hooks of the usual form."""
    module, lower, upper = Plus(), Lower(), Lower()
    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(lower, "lower")
    registry.register_hook(upper, "upper")
    registry.remove_hook("lower")
    module(X)
    assert upper.calls == 0


@pytest.mark.parametrize("kind", ["native", "accelerate"])
def test_removal_below_a_foreign_hook_keeps_that_one(kind: str) -> None:
    module, hook, other = Plus(), Ours(), Lower()
    link = install(module, hook, "test")
    if kind == "native":
        HookRegistry.check_if_exists_or_initialize(module).register_hook(other, "other")
    else:
        add_hook_to_module(module, AccelerateHook())
    assert module(X) == 20
    link.remove()
    assert module(X) == 2 and hook.calls == 1
    if kind == "native":
        assert other.calls == 2
        HookRegistry.check_if_exists_or_initialize(module).remove_hook("other")
    else:
        remove_hook_from_module(module)
    assert module(X) == 2


def test_relink_after_accelerate_dropped_us() -> None:
    """Accelerate's model offload takes its hook off and puts it on again at each run's end."""
    module, hook = Plus(), Ours()
    add_hook_to_module(module, AccelerateHook())
    link = install(module, hook, "test")
    assert module(X) == 20
    for run in range(3):
        remove_hook_from_module(module)
        add_hook_to_module(module, AccelerateHook())
        assert module(X) == 2, "negative control: without relink the hook is gone"
        link.relink()
        assert module(X) == 20 and hook.calls == run + 2
    link.remove()
    assert module(X) == 2


def test_relink_moves_an_outermost_hook_back_outside() -> None:
    module, order = Plus(), []

    class Tell(ModelHook):
        def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            order.append("native")
            return args, kwargs

    class TellOurs(Hook):
        def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            order.append("ours")
            return args, kwargs

    link = install(module, TellOurs(), "test", outermost=True)
    HookRegistry.check_if_exists_or_initialize(module).register_hook(Tell(), "tell")
    module(X)
    link.relink()
    module(X)
    assert order == ["native", "ours", "ours", "native"]
    link.remove()
    module(X)
    assert order[4:] == ["native"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_module_compile_stays_inside(when: str) -> None:
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(len([n for n in graph.graph.nodes if n.op == "call_function"]))
        return graph.forward

    torch._dynamo.reset()
    module, hook = Plus(), Ours()
    if when == "before":
        module.compile(backend=backend)
        module(X)
    link = install(module, hook, "test")
    if when == "after":
        module.compile(backend=backend)
        link.relink()
    assert module(X) == 20 and module(X) == 20
    assert hook.calls == 2 and seen == [1], "the graph is the module's own single addition, traced once"
    link.remove()
    assert module._compiled_call_impl is not None and module(X) == 2 and seen == [1]
    assert "forward" not in vars(module)


def test_torch_compile_wrapper_stays_inside() -> None:
    torch._dynamo.reset()
    module, hook = Plus(), Ours()
    compiled = torch.compile(module, backend="eager")
    link = install(compiled, hook, "test")
    assert compiled(X) == 20 and hook.calls == 1
    assert module(X) == 2, "the module inside is untouched"
    link.remove()
    assert compiled(X) == 2


def test_deepcopy_is_refused_by_name() -> None:
    module = Plus()
    install(module, Ours(), "test")
    with pytest.raises(IncompatibleError, match="deepcopy"):
        copy.deepcopy(module)


def test_one_name_once() -> None:
    module = Plus()
    install(module, Ours(), "test")
    with pytest.raises(IncompatibleError, match=r"diffaccel\.test"):
        install(module, Ours(), "test")
