"""Adams' methods in (noise level, slope), with order and corrector by hindsight. Pure functions on tensors.

A step from s to t adds the integral of the polynomial through the newest slopes (Adams-Bashforth). Once the slope at
t is known, the same step is integrated again with it (Adams-Moulton), and the difference is added: one evaluation a
step (PEC; Shampine and Gordon, Computer Solution of Ordinary Differential Equations, 1975). Which degree the next step
takes and whether the last one is corrected is told, for each sample of the batch, by how polynomials of degree 0, 1
and 2 would have foretold the newest slope. Decisions stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..extrapolation.newton import newton_weights
from .weights import integral_weights

MOST = 2  # degree of the polynomials, whatever is known: degree 3 explodes on few steps
TINY = 1e-30

# Strong guidance makes the ODE stiff. Where lambda is its largest rate of contraction, steps up to z / lambda are
# stable: with the corrector, z = 6/11 for a line as predictor (Adams-Bashforth of order 3 in disguise), and 6/5 for
# a constant, which still is of order 2; without it, 1 for a line and 2 for a constant. What is seen of z is the change
# of the slope over a step, relative to the slope: misses[0]. Where it is an oscillation, a line foretells the slope
# twice as badly as a constant: misses[1] / misses[0]. The numbers were chosen on the testbeds, guided and not.
BEGUN = 0.25  # change over the first step beyond which a loop is stiff: nothing else is known yet
NOTICED, OSCILLATING = 0.2, 1.4  # a change, and misses[1] / misses[0], beyond which it is later
BENDING, FORETOLD = 0.5, 0.75  # up to these the last step of a stiff loop takes a line, as nothing corrects it
HARSH, WILD = 1.5, 1.3  # a change, and misses[1] / misses[0], beyond which a step is not corrected


class Node(NamedTuple):
    """A noise level and the slope there, [B, ...] in float32."""

    at: float
    slope: torch.Tensor


class Course(NamedTuple):
    """Where a solver stands. Replaced, never written into.

    Attributes:
        nodes: the newest evaluations, oldest first, at most MOST + 1.
        moved: what the last step added before it was corrected, [B, ...]; None: there was none.
        added: what has to be added to the sample now: the last step's correction and the next step, [B, ...].
        degrees: of the polynomial that the next step takes, [B], int64.
        corrected: was the last step corrected, [B], bool.
        stiff: has the loop shown to be, [B], bool; it stays so.
    """

    nodes: tuple[Node, ...] = ()
    moved: torch.Tensor | None = None
    added: torch.Tensor | None = None
    degrees: torch.Tensor | None = None
    corrected: torch.Tensor | None = None
    stiff: torch.Tensor | None = None


def wide(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[B] as [B, 1, ...], to go with `like`."""
    return values.view(-1, *[1] * (like.ndim - 1))


def combined(nodes: Sequence[Node], weights: Sequence[float] | torch.Tensor) -> torch.Tensor:
    """sum_k w_k slope_k; `weights` are host numbers, or [nodes, B] with numbers of each sample's own."""
    total = torch.zeros_like(nodes[-1].slope)
    for node, weight in zip(nodes, weights, strict=True):
        total = total + (wide(weight, total) if isinstance(weight, torch.Tensor) else weight) * node.slope
    return total


def misses(nodes: Sequence[Node], now: Node) -> torch.Tensor:
    """|forecast - slope| / |slope| for the newest slope, by the degrees that earlier nodes allow, [degrees, B]."""
    truth = now.slope.flatten(1)
    size = torch.linalg.vector_norm(truth, dim=1).clamp(min=TINY)
    found = []
    for degree in range(min(len(nodes), MOST + 1)):
        known = nodes[-(degree + 1) :]
        guess = combined(known, newton_weights([node.at for node in known], now.at)).flatten(1)
        found.append(torch.linalg.vector_norm(guess - truth, dim=1) / size)
    return torch.stack(found) if found else truth.new_zeros(0, len(truth))


def turns_stiff(found: torch.Tensor) -> torch.Tensor:
    """Do the newest `misses` show it, [B]?"""
    change = found[0]
    return change > BEGUN if len(found) < 2 else (change > NOTICED) & (found[1] > OSCILLATING * change)


def foretold(found: torch.Tensor) -> torch.Tensor:
    """Does a line foretell the slopes better than a constant, clearly, [B]?"""
    return (found[0] < BENDING) & (found[1] < FORETOLD * found[0]) if len(found) > 1 else found[0] < BEGUN


def padded(weights: Sequence[float], count: int) -> list[float]:
    """Weights of the newest nodes, with zeros for the older ones."""
    return [0.0] * (count - len(weights)) + list(weights)


@dataclass(frozen=True)
class Adams:
    """The rules of a solver.

    Attributes:
        order: of the predictor, 1 (Euler) to 3, as soon as there are so many evaluations; None: by hindsight.
        corrector: is a step corrected, by the formula one order above the predictor's (at most 3); None: by hindsight.
    """

    order: int | None = None
    corrector: bool | None = None

    def advance(self, course: Course, now: Node, found: torch.Tensor, end: float, last: bool = False) -> Course:
        """The slope `now` is known, and its `misses`; the next step goes on from there to noise level `end`, `last` of
        the loop."""
        nodes, stiff = (*course.nodes, now)[-(MOST + 1) :], course.stiff
        if stiff is None or len(found) == 0:
            stiff = torch.zeros(len(now.slope), dtype=torch.bool, device=now.slope.device)
        else:
            stiff = stiff | turns_stiff(found)
        degrees = self.degrees(nodes, stiff & ~foretold(found) if last and len(found) else stiff)
        ats = [node.at for node in nodes]
        rows = [padded(integral_weights(ats[-(d + 1) :], now.at, end), len(ats)) for d in range(len(ats))]
        moved = combined(nodes, now.slope.new_tensor(rows)[degrees].T)
        corrected = self.corrects(course, found)
        added = moved if corrected is None else moved + wide(corrected, moved) * self.correction(course, now)
        return Course(nodes, moved, added, degrees, corrected, stiff)

    def correction(self, course: Course, now: Node) -> torch.Tensor:
        """What the last step lacked, now that the slope at its end is known, [B, ...]."""
        assert course.moved is not None
        known = (*course.nodes, now)[-(MOST + 1) :]
        return combined(known, integral_weights([n.at for n in known], course.nodes[-1].at, now.at)) - course.moved

    def corrects(self, course: Course, found: torch.Tensor) -> torch.Tensor | None:
        """Is the last step corrected, [B]? None: there was no step."""
        if course.moved is None:
            return None
        if self.corrector is not None or len(found) < 2:
            return found.new_full(found.shape[1:], self.corrector is not False, dtype=torch.bool)
        return (found[0] < HARSH) | (found[1] < WILD * found[0])

    def degrees(self, nodes: Sequence[Node], stiff: torch.Tensor) -> torch.Tensor:
        """Of the polynomial that the next step takes, [B]. By hindsight a line, or a constant where it is stiff."""
        if self.order is None and len(nodes) > 1:
            return (~stiff).long()
        return torch.full_like(stiff, min((self.order or 1) - 1, len(nodes) - 1), dtype=torch.long)
