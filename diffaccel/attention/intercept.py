"""The one place where attention is intercepted: per processor of one denoiser, never process-wide.

Eagerly, a call goes straight to the handler. In a graph of torch.compile it goes through one custom op, which is the
same for all layers (the layer is a tensor among its inputs), so that whatever a handler decides from call to call
never compiles anything again.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..core.compat import attention_backends, dispatch_attention, host_edit, unwrap_module, vmap_allowed
from ..core.listener import Listener
from ..core.place import LAST, Rank
from ..core.root import RootHook
from ..core.run import Call
from ..models.spec import ModelSpec
from .calls import Handler, Inputs, Where
from .geometry import Geometry
from .processors import form, functional, plain_class, processors, routed_class
from .tokens import geometry_of

BACKEND = "_attention_backend"  # attribute of diffusers' processors: a backend that was set by name, or None
SITE = "_diffaccel_attention"  # attribute of an attention module: its `LayerSite`

_SITES: weakref.WeakValueDictionary[int, LayerSite] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class LayerSite:
    """One intercepted attention module. `token` names it inside compiled graphs, `counter` counts its calls there."""

    def __init__(
        self, interception: Interception, name: str, layer: int, attention: torch.nn.Module, processor: Any
    ) -> None:
        self.interception, self.name, self.layer, self.cross = interception, name, layer, _is_cross(attention)
        self.backend = getattr(processor, BACKEND, None)  # what the user had set; another one takes our place
        number = next(_NUMBERS)
        self.token, self.counter = torch.tensor(number), torch.tensor(0)
        _SITES[number] = self


class _Here(threading.local):
    site: LayerSite | None = None


class _Traced:
    """The layer whose processor is being traced; graphs are traced one at a time."""

    token: torch.Tensor | None = None
    counter: torch.Tensor | None = None
    inline: Any = None


_HERE = _Here()
_TRACED = _Traced()


class Interception(Listener):
    """The intercepted attention of one denoiser: `handler` answers the calls of the runs of one pipeline."""

    def __init__(self, module: torch.nn.Module, spec: ModelSpec, handler: Handler) -> None:
        self.module, self.spec, self.handler = unwrap_module(module), spec, handler
        self.inline: Any = None  # a diffusers backend that graphs may call themselves; see `_dispatch`
        self.in_force: Any = None  # the same, while a denoiser call of our own is in progress
        self.call: Call | None = None  # the denoiser call in progress
        self.grid: Geometry | None = None
        self.sites: dict[str, LayerSite] = {}
        self.routed: list[weakref.ref[Any]] = []
        self.layers = 0
        self.stop_listening: Callable[[], None] = lambda: None

    @host_edit
    def open(self, root: RootHook, rank: Rank = LAST) -> Interception:
        """Intercept every processor that can be; those of other forms stay as they are (see `blind`)."""
        self.route()
        self.stop_listening = root.add(self, rank)
        return self

    @host_edit
    def route(self) -> None:
        """Intercept what is not intercepted yet: all of it, or processors that were set since."""
        blocks: dict[str, int] = {}
        for row in self.spec.stack:
            for i, _ in enumerate(getattr(self.module, row.attribute, ())):
                blocks[f"{row.attribute}.{i}"] = len(blocks)
        found = [(n, a, p) for n, a, p in processors(self.module) if form(p) is not None]
        self.layers = len(blocks) or len(found)
        for i, (name, attention, processor) in enumerate(found):
            if SITE not in vars(attention):
                layer = blocks.get(".".join(name.split(".")[:2]), -1) if blocks else i
                site = vars(attention)[SITE] = LayerSite(self, name, layer, attention, processor)
                self.sites[name] = site
            if plain_class(processor) is type(processor):
                cls = routed_class(type(processor), _dispatch, _FUNCTIONAL, _enter)
                object.__setattr__(processor, "__class__", cls)
                self.routed.append(weakref.ref(processor))

    def displaced(self) -> tuple[list[str], list[str]]:
        """What has taken our place at attention layers since, one entry a layer.

        Returns:
            (classes of processors that cannot be intercepted, backends of diffusers that were set on ours).
        """
        kinds, backends = [], []
        for _, attention, processor in processors(self.module):
            site = vars(attention).get(SITE)
            if site is None or site.interception is not self:
                continue
            if form(processor) is None:
                kinds.append(type(processor).__name__)
            elif _other_backend(site, processor):
                backend = getattr(processor, BACKEND, None)
                backends.append("the default" if backend is None else backend.value)
        return kinds, backends

    @host_edit
    def close(self) -> None:
        """Give every processor its class back."""
        for _, attention, _ in processors(self.module):
            vars(attention).pop(SITE, None)
        for ref in self.routed:  # also those that another one has replaced since: the user may set them again
            processor = ref()
            if processor is not None:
                object.__setattr__(processor, "__class__", plain_class(processor))
        self.routed.clear()
        self.stop_listening()
        self.sites = {}

    def begin_call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The denoiser is about to run (under its root hook's lock)."""
        self.call, self.in_force = call, self.inline
        self.grid = geometry_of(self.spec, self.module, args, kwargs)

    def end_call(self, call: Call) -> None:
        """The denoiser returned or raised."""
        self.call = self.grid = self.in_force = None

    def attend(self, site: LayerSite, inputs: Inputs, plain: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Answer one attention call: by the handler within a run of the pipeline, else as without us."""
        if self.call is None:
            return plain()
        grid = self.grid
        if grid is not None:
            text = inputs.q.shape[1] - grid.video
            fits = text >= 0 and inputs.k.shape[1] == inputs.q.shape[1] and not site.cross and site.layer >= 0
            fits = fits and (text == 0 or grid.text > 0)
            grid = Geometry(*grid.shape, text, grid.text_first, grid.frame_sink) if fits else None
        cross = site.cross or inputs.k.shape[1] != inputs.q.shape[1]
        where = Where(site.layer, self.layers, site.name, cross, grid, self.call)
        output: torch.Tensor = self.handler(where, inputs, plain)
        return output


def blind(module: torch.nn.Module) -> list[str]:
    """Paths of the attention modules whose processors compute in a way that cannot be intercepted."""
    return [name for name, _, processor in processors(module) if form(processor) is None]


def _other_backend(site: LayerSite, processor: Any) -> bool:
    """Did the user choose another backend for this layer (`set_attention_backend`) since we are there?"""
    return getattr(processor, BACKEND, None) is not site.backend


def _is_cross(attention: Any) -> bool:
    """Does this module attend from one sequence to another? Joint attention over both is not cross."""
    joint = getattr(attention, "add_q_proj", None) is not None or getattr(attention, "added_kv_proj_dim", None)
    return bool(getattr(attention, "is_cross_attention", False)) and not joint


# ---- what processors find under the two names ----------------------------------------------------------------------


def _enter(
    call: Callable[..., Any], plain: Callable[..., Any], processor: Any, attn: Any, *args: Any, **kw: Any
) -> Any:
    """Run an intercepted processor, with its layer known to what it calls."""
    site = getattr(attn, SITE, None)
    if site is None or _other_backend(site, processor):  # shared with a module outside of the denoiser, or displaced
        return plain(processor, attn, *args, **kw)
    if torch.compiler.is_compiling():
        _TRACED.token, _TRACED.counter = site.token, site.counter
        _TRACED.inline = site.interception.in_force
        output = call(processor, attn, *args, **kw)
        _TRACED.token = _TRACED.counter = None
        return output
    before = _HERE.site
    _HERE.site = site
    try:
        return call(processor, attn, *args, **kw)
    finally:
        _HERE.site = before


def _dispatch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    backend: Any = None,
    parallel_config: Any = None,
) -> torch.Tensor:
    """Stands for diffusers' `dispatch_attention_fn`; q, k, v [B, N, H, D]."""
    own = {"backend": backend, "parallel_config": parallel_config, "attention_kwargs": attention_kwargs}
    if dropout_p or attention_kwargs or parallel_config is not None:
        plain: torch.Tensor = dispatch_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **own
        )
        return plain
    if torch.compiler.is_compiling():
        inline = _TRACED.inline
        if inline is not None and inline.takes(attn_mask is not None, is_causal):
            own["backend"] = inline.member
            _count_call(_TRACED.token, _TRACED.counter)
            found: torch.Tensor = dispatch_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, **own
            )
            return found
        name = None if backend is None else backend if isinstance(backend, str) else backend.value
        return _in_graph(query, key, value, attn_mask, scale, is_causal, enable_gqa, name, False)
    return _eager(query, key, value, attn_mask, _HERE.site, scale, is_causal, enable_gqa, backend)


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stands for PyTorch's `scaled_dot_product_attention`; q, k, v [B, H, N, D]."""
    if dropout_p:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if torch.compiler.is_compiling():
        return _in_graph(query, key, value, attn_mask, scale, is_causal, enable_gqa, None, True)
    return _eager_sdpa(query, key, value, attn_mask, _HERE.site, scale, is_causal, enable_gqa)


def _in_graph(
    q: Any, k: Any, v: Any, mask: Any, scale: Any, causal: bool, gqa: bool, backend: str | None, heads_first: bool
) -> torch.Tensor:
    output: torch.Tensor = _op(q, k, v, mask, _TRACED.token, scale, causal, gqa, backend, heads_first)
    return output


def _eager(
    q: Any, k: Any, v: Any, mask: Any, site: LayerSite | None, scale: Any, causal: bool, gqa: bool, backend: Any
) -> torch.Tensor:
    def plain() -> torch.Tensor:
        output: torch.Tensor = dispatch_attention(q, k, v, mask, 0.0, causal, scale, gqa, backend=backend)
        return output

    return (
        plain() if site is None else site.interception.attend(site, Inputs(q, k, v, mask, scale, causal, gqa), plain)
    )


def _eager_sdpa(
    q: Any, k: Any, v: Any, mask: Any, site: LayerSite | None, scale: Any, causal: bool, gqa: bool
) -> torch.Tensor:
    def own() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=gqa)

    if site is None or site.interception.call is None or q.ndim != 4:
        return own()
    inputs = Inputs(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, scale, causal, gqa)
    return site.interception.attend(site, inputs, lambda: own().transpose(1, 2)).transpose(1, 2)


_FUNCTIONAL = functional(_sdpa)


@torch.library.custom_op("diffaccel::attention", mutates_args=())
def _op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    token: torch.Tensor,
    scale: float | None,
    causal: bool,
    gqa: bool,
    backend: str | None,
    heads_first: bool,
) -> torch.Tensor:
    """An attention call from inside a compiled graph."""
    site = _SITES.get(int(token))
    with vmap_allowed():
        if heads_first:
            output = _eager_sdpa(q, k, v, mask, site, scale, causal, gqa)
        else:
            member = None if backend is None else attention_backends()[backend]
            output = _eager(q, k, v, mask, site, scale, causal, gqa, member)
        return output.contiguous()


@torch.library.custom_op("diffaccel::count_attention_call", mutates_args=("counter",))
def _count_call(token: torch.Tensor, counter: torch.Tensor) -> None:
    """A compiled graph computes an attention call by itself. `counter` changes, so that no graph leaves this out."""
    counter.add_(1)
    site = _SITES.get(int(token))
    if site is not None and site.interception.call is not None:
        site.interception.inline.count(site.interception.call)


@_op.register_fake
def _(
    q: Any, k: Any, v: Any, mask: Any, token: Any, scale: Any, causal: Any, gqa: Any, backend: Any, first: Any
) -> Any:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))
