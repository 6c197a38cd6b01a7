"""Sparse VideoGen 2 (semantic-aware permutation): tokens that point the same way are put together, and a cluster of
queries sees the clusters of keys that hold most of its attention.

Yang et al., "Sparse VideoGen2: Accelerate Video Generation with Sparse Attention via Semantic-Aware Permutation"
(2025). Per head: k-means of the queries and of the keys; P_ij = softmax over j of c_q,i . c_k,j / sqrt(D), weighted
by the size of cluster j; of every row the largest P are kept until they sum to more than top_p.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

import torch

from ...ledger.hardware import widest
from ..geometry import Geometry
from ..plan import BlockPlan, HeadPlans
from .layout import BLOCK, around_text, full, video_share, video_start
from .method import Query
from .options import COUNT, SHARE, SHARE_OR_0, take

CHUNK_BYTES = 2**28  # of distances held at once


@dataclass(frozen=True)
class Centroids:
    """Of queries [n, Cq, D] and keys [n, Ck, D], float32; n heads (batch x heads). A warm start for the next call.

    `iterations` of k-means have led to them, since they were drawn.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    iterations: int = 0


def assign(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """[n, N] int64: the nearest centroid (Euclidean, the first of equals) of x [n, N, D], centroids [n, C, D]."""
    half = centroids.square().sum(-1)[:, None] / 2
    step = max(1, CHUNK_BYTES // (4 * centroids.shape[0] * centroids.shape[1]))
    turned = centroids.transpose(1, 2)
    return torch.cat([(part @ turned - half).argmax(-1) for part in x.split(step, 1)], 1)


def means(x: torch.Tensor, labels: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean of every cluster [n, C, D], sizes [n, C] int64); an empty cluster stays where it was."""
    sizes = torch.zeros(centroids.shape[:2], dtype=torch.int64, device=x.device)
    sizes.scatter_add_(1, labels, torch.ones_like(labels))
    sums = torch.zeros_like(centroids).scatter_add_(1, labels[..., None].expand_as(x), x)
    return torch.where(sizes[..., None] > 0, sums / sizes.clamp(min=1)[..., None], centroids), sizes


def kmeans(
    x: torch.Tensor, clusters: int, iterations: int, *, start: torch.Tensor | None = None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lloyd's k-means of every head on its own: (labels [n, N], centroids [n, C, D], sizes [n, C]).

    Args:
        x: [n, N, D]; computed in float32.
        start: [n, C, D] centroids to start from; None: distinct tokens drawn with `seed`.
        iterations: at most so many; it ends sooner where no label changes.
    """
    x = x.float()
    if start is None:
        drawn = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed))[:clusters]
        start = x[:, drawn.to(x.device)]
    centroids, labels = start, assign(x, start)
    for _ in range(iterations - 1):
        centroids, _ = means(x, labels, centroids)
        before, labels = labels, assign(x, centroids)
        if torch.equal(before, labels):
            break
    centroids, sizes = means(x, labels, centroids)
    return labels, centroids, sizes


def probabilities(q: torch.Tensor, k: torch.Tensor, sizes: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """[n, Cq, Ck]: attention between centroids q [n, Cq, D] and k [n, Ck, D], weighted by `sizes` [n, Ck] of k."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (scores + sizes.to(scores).log()[:, None]).softmax(-1)


def top_map(
    weights: torch.Tensor,
    top_p: float,
    *,
    min_kc_ratio: float = 0.0,
    sizes: torch.Tensor | None = None,
    density: float | None = None,
) -> torch.Tensor:
    """[n, Cq, Ck] boolean: of every row the largest weights, up to and with the one that brings the sum over top_p.

    Args:
        weights: [n, Cq, Ck], rows sum to 1.
        min_kc_ratio: at least floor(ratio * Ck) clusters a row.
        density: at most this share of the keys a row (by `sizes` [n, Ck]), though never less than one cluster.
    """
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    kept = ranked.cumsum(-1) - ranked <= top_p
    kept[..., 0] = True
    kept[..., : int(min_kc_ratio * weights.shape[-1])] = True
    if density is not None and sizes is not None:
        share = sizes[:, None].expand_as(order).gather(-1, order).cumsum(-1) / sizes.sum(-1)[:, None, None]
        within = share <= density
        within[..., 0] = True
        kept &= within
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def size_weighted_density(kept: torch.Tensor, q_sizes: torch.Tensor, k_sizes: torch.Tensor) -> torch.Tensor:
    """[n]: kept pairs of tokens over all pairs."""
    pairs = (kept.to(widest(kept.device)) * q_sizes[:, :, None] * k_sizes[:, None]).sum((1, 2))
    return pairs / (q_sizes.sum(1) * k_sizes.sum(1))


def clustered(
    geometry: Geometry,
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    clusters: tuple[int, int],
    iterations: int,
    warm: Centroids | None = None,
    seed: int = 0,
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], Centroids]:
    """K-means of the video's queries and keys, q, k [B, H, N, D]; n = B x H heads.

    Returns:
        (labels [n, video] and sizes [n, C] of the queries and of the keys; the centroids).
    """
    start = video_start(geometry)
    video = slice(start, start + geometry.video)
    starts = (None, None) if warm is None else (warm.queries, warm.keys)
    sides = [
        kmeans(x[:, :, video].flatten(0, 1), min(c, geometry.video), iterations, start=s, seed=seed)
        for x, c, s in zip((q, k), clusters, starts, strict=True)
    ]
    (_, q_mean, _), (_, k_mean, _) = sides
    done = iterations + (0 if warm is None else warm.iterations)
    return [(labels, sizes) for labels, _, sizes in sides], Centroids(q_mean, k_mean, done)


def cluster_plans(
    geometry: Geometry,
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    clusters: tuple[int, int],
    top_p: float,
    min_kc_ratio: float = 0.1,
    density: float | None = None,
    iterations: int = 50,
    warm: Centroids | None = None,
    scale: float | None = None,
    seed: int = 0,
    block: int = BLOCK,
) -> tuple[HeadPlans, Centroids]:
    """A plan for every head from q, k [B, H, N, D], and centroids for the next call.

    Args:
        clusters: of queries and of keys (at most the video's tokens). Empty ones do not come into the plan.
        warm: centroids of an earlier call of the same shape; None: drawn with `seed`.
        block: tokens of a text block; text is not clustered, and dense.
    """
    sides, centroids = clustered(geometry, q, k, clusters=clusters, iterations=iterations, warm=warm, seed=seed)
    (q_labels, q_sizes), (k_labels, k_sizes) = sides
    allowed = None if density is None else video_share(geometry, density)
    weights = probabilities(centroids.queries, centroids.keys, k_sizes, scale)
    kept = top_map(weights, top_p, min_kc_ratio=min_kc_ratio, sizes=k_sizes, density=allowed).cpu()
    orders = q_labels.argsort(dim=1, stable=True).cpu(), k_labels.argsort(dim=1, stable=True).cpu()
    q_sizes, k_sizes = q_sizes.cpu(), k_sizes.cpu()
    plans = tuple(
        _head_plan(geometry, kept[n], (orders[0][n], orders[1][n]), (q_sizes[n], k_sizes[n]), block)
        for n in range(len(kept))
    )
    return HeadPlans(plans, torch.arange(len(plans)).view(q.shape[:2])), centroids


def _head_plan(
    geometry: Geometry,
    kept: torch.Tensor,
    orders: tuple[torch.Tensor, torch.Tensor],
    sizes: tuple[torch.Tensor, torch.Tensor],
    block: int,
) -> BlockPlan:
    """One head's plan; clusters without a token left out."""
    rows, columns = sizes[0] > 0, sizes[1] > 0
    queries, q_video = around_text(geometry, sizes[0][rows], orders[0], block)
    keys, k_video = around_text(geometry, sizes[1][columns], orders[1], block)
    whole = torch.ones(queries.count, keys.count, dtype=torch.bool)
    whole[q_video, k_video] = kept[rows][:, columns]
    return BlockPlan.of_mask(whole, queries, keys)


# ---- the config -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SparseVideoGen2:
    """Sparse VideoGen 2: clusters of queries see the clusters of keys that matter to them.

    Attributes:
        density: a cap for every row; None: `top_p` alone decides.
        top_p: attention mass (by centroids) that a row keeps.
        q_clusters, k_clusters: None: one for 252 queries and one for 76 keys, as in the paper at 720p.
        min_kc_ratio: at least this share of the key clusters, unless density is less.
        first_iterations, iterations: of k-means before the first sparse call of a run, and at each one (warm). The
            first ones are spread over the dense steps at the start, where there are some: centroids that follow q and
            k through them leave little for the first sparse call to do.
        block: tokens of a text block.
    """

    density: float | None = None
    top_p: float = 0.9
    q_clusters: int | None = None
    k_clusters: int | None = None
    min_kc_ratio: float = 0.1
    first_iterations: int = 50
    iterations: int = 2
    block: int = BLOCK

    name: ClassVar[str] = "svg2"
    static: ClassVar[bool] = False

    def __post_init__(self) -> None:
        take(self, SHARE.or_none(), "density", "top_p")
        take(self, SHARE_OR_0, "min_kc_ratio")
        take(self, COUNT.or_none(), "q_clusters", "k_clusters")
        take(self, COUNT, "first_iterations", "iterations", "block")

    def _clusters(self, geometry: Geometry) -> tuple[int, int]:
        queries = self.q_clusters or ceil(geometry.video / 252)
        keys = self.k_clusters or ceil(geometry.video / 76)
        return min(queries, geometry.video), min(keys, geometry.video)

    def plan(self, query: Query) -> HeadPlans:
        """A plan for every head of the batch; `state["centroids"]` is the warm start of the next call."""
        geometry = query.geometry
        if self.density == 1.0:
            return full(geometry.tokens, self.block)
        q, k = query.tensors(self.name)
        clusters, warm = self._clusters(geometry), self._known(query)
        done = 0 if warm is None else warm.iterations
        plans, query.state["centroids"] = cluster_plans(
            geometry,
            q,
            k,
            clusters=clusters,
            top_p=self.top_p,
            min_kc_ratio=self.min_kc_ratio,
            density=self.density,
            iterations=max(self.iterations, self.first_iterations - done),
            warm=warm,
            scale=query.scale,
            seed=query.layer,
            block=self.block,
        )
        return plans

    def warm(self, query: Query, steps: int) -> None:
        """One of `steps` dense steps at the start of a run: the centroids follow its q and k."""
        if self.density == 1.0:
            return
        q, k = query.tensors(self.name)
        _, query.state["centroids"] = clustered(
            query.geometry,
            q,
            k,
            clusters=self._clusters(query.geometry),
            iterations=ceil(self.first_iterations / steps),
            warm=self._known(query),
            seed=query.layer,
        )

    def _known(self, query: Query) -> Centroids | None:
        """The centroids that this layer had before, unless of another batch or size."""
        q, _ = query.tensors(self.name)
        known: Centroids | None = query.state.get("centroids")
        clusters = self._clusters(query.geometry)
        shape = (q.shape[0] * q.shape[1], clusters[0], q.shape[3])
        same = known is not None and known.queries.shape == shape and known.keys.shape[1] == clusters[1]
        return known if same else None

    def describe(self, geometry: Geometry) -> dict[str, Any]:
        """{clusters, top_p, cap}: the density depends on q and k."""
        return {"clusters": self._clusters(geometry), "top_p": self.top_p, "cap": self.density}
