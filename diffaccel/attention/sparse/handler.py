"""What sparse attention does with one call: stay dense, or ask the method for a plan and the kernel for the output.

Dense stay the first steps and layers, cross-attention, text refiners, and what a mask makes unreadable. Plans of
methods that look at the geometry alone are kept.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ...core.run import Run
from ...core.state import PerRun
from ...errors import InvalidOptionError
from ..calls import Counts, Inputs, Where
from ..geometry import Geometry
from ..kernels import Kernel
from ..padding import PaddingReader
from ..plan import BlockPlan, HeadPlans
from .method import Query, Warms
from .registry import METHODS, auto_method

KEPT_PLANS = 8  # geometries whose plans are kept; a run has one or two


class MethodStates(dict[tuple[Any, ...], dict[str, Any]]):
    """What methods keep per layer and branch; methods replace tensors and never write into them."""

    def fork(self) -> MethodStates:
        """For another run."""
        return MethodStates((key, dict(state)) for key, state in self.items())


class SparseHandler:
    """Answers self-attention of video tokens sparsely; leaves the rest as it is. Arguments: see `SparseAttention`."""

    def __init__(
        self,
        name: str,
        kernel: Kernel,
        method: Any,
        density: float | None = None,
        dense_steps: float = 0,
        dense_layers: int = 0,
    ) -> None:
        self.name, self.kernel, self.method, self.density = name, kernel, method, density
        self.dense_steps, self.dense_layers = dense_steps, dense_layers
        self.padding = PaddingReader()
        self.plans: OrderedDict[tuple[str, Geometry], HeadPlans] = OrderedDict()  # of static methods
        self.configs: dict[str, Any] = {}

    # ---- what the run sees -----------------------------------------------------------------------------

    def begin_run(self, run: Run) -> None:
        """A run begins: count anew."""
        self.padding.forget()
        run.state[self.name] = PerRun(counts=Counts(), density=[], methods=MethodStates())

    def stats(self, run: Run) -> dict[str, Any]:
        """Calls by kind, fallbacks by reason, mean density of the sparse calls."""
        self.padding.forget()
        state = run.state.get(self.name, PerRun())
        if not state:
            return {}
        found = state["density"]
        mean = {"density": sum(found) / len(found)} if found else {}
        return {"kernel": self.kernel.name, **state["counts"].stats(), **mean}

    # ---- one call --------------------------------------------------------------------------------------

    def __call__(self, where: Where, inputs: Inputs, plain: Callable[[], Any]) -> Any:
        """Answer one attention call."""
        state = where.call.run.state[self.name]
        counts: Counts = state["counts"]
        if where.cross or where.geometry is None:
            counts.add("other")  # cross-attention, text refiners
            return plain()
        if self._dense(where):
            self._warm(where, inputs, state)
            counts.add("dense")
            return plain()
        reason, valid = self._readable(where.geometry, inputs)
        if reason is not None:
            counts.fall_back(where, self.name, reason)
            return plain()
        output = self._sparse(where, inputs, valid, state)
        counts.add("dense" if output is None else "sparse")
        return plain() if output is None else output

    def _dense(self, where: Where) -> bool:
        first = self._first_sparse(where.call.run.total)
        return self._always_dense(where) or first is None or where.call.step < first

    def _always_dense(self, where: Where) -> bool:
        return self.density == 1 or where.layer < self.dense_layers

    def _first_sparse(self, total: int | None) -> int | None:
        """The first step that may be sparse; None where none may. `total` steps, None: unknown."""
        steps = self.dense_steps
        if 0 < steps < 1:
            return None if total is None else math.ceil(steps * total)
        return None if steps == 1 and not isinstance(steps, int) else int(steps)

    def _warm(self, where: Where, inputs: Inputs, state: dict[str, Any]) -> None:
        """A dense step: show q and k to a method that starts warm, if this layer will be sparse later on."""
        total = where.call.run.total
        first = self._first_sparse(total)
        if self._always_dense(where) or first is None or (total is not None and first >= total):
            return
        assert where.geometry is not None
        method = self._method(where.geometry)
        if isinstance(method, Warms):
            reason, valid = self._readable(where.geometry, inputs)
            for rows, count in () if reason is not None else _groups(valid):
                method.warm(self._query(where, inputs, rows, count, state), first)

    def _readable(self, geometry: Geometry, inputs: Inputs) -> tuple[str | None, tuple[int, ...]]:
        """(why this call cannot be answered, or None; valid tokens of each sample)."""
        if inputs.causal or inputs.gqa or inputs.lse:
            return "it is causal, has grouped queries or asks for the log-sum-exp", ()
        batch, tokens = inputs.q.shape[:2]
        valid = self.padding.read(inputs.mask, batch, tokens, inputs.k.shape[1])
        if valid is None:
            return "its mask hides more than padding at the end", ()
        if min(valid) < geometry.video or (geometry.text_first and min(valid) < tokens):
            return "its mask hides video tokens", ()
        return None, valid

    def _sparse(self, where: Where, inputs: Inputs, valid: tuple[int, ...], state: dict[str, Any]) -> Any:
        """The output [B, N, H, D]; None where the method asks for dense attention."""
        asked = [(rows, self._query(where, inputs, rows, count, state)) for rows, count in _groups(valid)]
        planned = [(rows, query, self._plan(query)) for rows, query in asked]
        found = [(rows, query, plans) for rows, query, plans in planned if plans is not None]
        if len(found) < len(planned):
            return None
        for _, _, plans in found:
            self._book(where, plans.density, state)
        parts = [self._rows(inputs, rows, query, plans) for rows, query, plans in found]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).transpose(1, 2)

    def _rows(self, inputs: Inputs, rows: slice, query: Query, plans: HeadPlans) -> torch.Tensor:
        """Samples with the same number of valid tokens, [B, H, N, D]; padded queries are computed as they were."""
        output: torch.Tensor = self.kernel.run(query.q, query.k, query.v, plans, scale=query.scale)
        valid, mask = output.shape[2], inputs.mask
        if valid == inputs.q.shape[1] or mask is None:
            return output
        if mask.shape[0] > 1:
            mask = mask[rows]
        if mask.shape[2] > 1:
            mask = mask[:, :, valid:]
        q, k, v = (x[rows].transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        padded = F.scaled_dot_product_attention(q[:, :, valid:], k, v, mask, scale=inputs.scale)
        return torch.cat([output, padded], dim=2)

    def _query(self, where: Where, inputs: Inputs, rows: slice, valid: int, state: dict[str, Any]) -> Query:
        """The question to the method about these samples, of which so many tokens are valid."""
        assert where.geometry is not None
        geometry = replace(where.geometry, text=valid - where.geometry.video)
        q, k, v = (x[rows, :valid].transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        key = (where.call.component, where.call.branch, where.name, rows.start, geometry)
        kept = state["methods"].setdefault(key, {})
        return Query(geometry, q, k, v, inputs.scale, where.layer, where.call.step, kept)

    def _book(self, where: Where, density: float, state: dict[str, Any]) -> None:
        state["density"].append(density)
        asked = self.density
        if asked is not None and density > 1.1 * asked:
            where.call.run.note(
                f"{self.name} keeps {density:.2f} of all pairs where density={asked:g} was asked for: this size "
                "and method allow no less"
            )

    # ---- plans -----------------------------------------------------------------------------------------

    def _plan(self, query: Query) -> HeadPlans | None:
        method = self._method(query.geometry)
        if getattr(method, "static", False):
            return self._kept_plan(method, query.geometry)
        if hasattr(method, "plan"):
            found = method.plan(query)
        else:
            at = {"layer": query.layer, "step": query.step, "state": query.state}
            found = method(query.geometry, query.q, query.k, **at)
        if isinstance(found, BlockPlan):
            found = HeadPlans((found,))
        if found is not None and not isinstance(found, HeadPlans):
            raise InvalidOptionError(
                f"{self.name}: the method returned {type(found).__name__}; a HeadPlans, a BlockPlan or None "
                "(dense) is wanted"
            )
        return found

    def _kept_plan(self, method: Any, geometry: Geometry) -> HeadPlans:
        """The plan of a method that looks at nothing but the geometry, made once for each."""
        known = (type(method).__name__, geometry)
        if known not in self.plans:
            self.plans[known] = method.plan(Query(geometry))
            if len(self.plans) > KEPT_PLANS:
                self.plans.popitem(last=False)
        self.plans.move_to_end(known)
        return self.plans[known]

    def _method(self, geometry: Geometry) -> Any:
        if not isinstance(self.method, str):
            return self.method
        name = auto_method(geometry, self.density)[0] if self.method == "auto" else self.method
        if name not in self.configs:
            own = {} if self.density is None else {"density": self.density}
            self.configs[name] = METHODS[name](**own)
        return self.configs[name]


def _groups(valid: tuple[int, ...]) -> list[tuple[slice, int]]:
    """(samples, number of their valid tokens): the whole batch at once where all have the same number."""
    if len(set(valid)) == 1:
        return [(slice(None), valid[0])]
    return [(slice(i, i + 1), n) for i, n in enumerate(valid)]
