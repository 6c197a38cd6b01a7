"""Masks of sparse attention against the papers' formulas written out over tokens, and published densities."""

from __future__ import annotations

import itertools

import pytest
import torch

from diffaccel.attention.geometry import Geometry
from diffaccel.attention.plan import BlockPlan
from diffaccel.attention.sparse import layout, radial, sta, svg, svg2, topk
from tests.attention.golden_masks import any_of_blocks

GRIDS = [
    Geometry(4, 6, 7),
    Geometry(5, 3, 5, text=9),
    Geometry(5, 3, 5, text=9, text_first=True),
    Geometry(6, 5, 7, text=16),
    Geometry(1, 4, 4),
    Geometry(17, 3, 2, text=3, text_first=True),
]
WAN_720P = Geometry(21, 45, 80, frame_sink=True)


def is_permutation(order: torch.Tensor | None, tokens: int) -> bool:
    return order is None or order.sort().values.tolist() == list(range(tokens))


def covers(plan: BlockPlan, geometry: Geometry) -> None:
    """Every token once on either side, text dense, no empty row."""
    for blocks in (plan.queries, plan.keys):
        assert blocks.tokens == geometry.tokens and bool((blocks.starts.diff() > 0).all())
        assert is_permutation(blocks.order, geometry.tokens)
    assert bool((plan.indptr.diff() > 0).all())
    mask = plan.token_mask()
    text = slice(0, geometry.text) if geometry.text_first else slice(geometry.video, geometry.tokens)
    assert bool(mask[text].all()) and bool(mask[:, text].all())


# ---- radial ---------------------------------------------------------------------------------------------------------


def radial_pair(i: int, j: int, r: int, c: int, s: int, decay: float, block: int, sink: bool) -> bool:
    """The paper's rule for one pair, in the words of the paper."""
    if sink and j == 0:
        return True
    d = abs(i - j)
    band, scale = 2 ** s.bit_length(), 2 ** d.bit_length()
    if band / scale < block and d % (block * scale // band) != 0:
        return False
    return abs(r - c) <= (s if d <= 1 else max(decay * band / scale, block))


@pytest.mark.parametrize("geometry", GRIDS, ids=str)
@pytest.mark.parametrize(("decay", "sink"), [(1.0, False), (0.3, True)])
def test_radial_keeps_every_block_with_a_pair_of_the_rule(geometry: Geometry, decay: float, sink: bool) -> None:
    s, start = geometry.frame, layout.video_start(geometry)
    truth = torch.ones(geometry.tokens, geometry.tokens, dtype=torch.bool)
    for a, b in itertools.product(range(geometry.video), repeat=2):
        kept = radial_pair(a // s, b // s, a % s, b % s, s, decay, 4, sink)
        truth[start + a, start + b] = kept
    assert torch.equal(radial.radial_token_mask(geometry, decay=decay, block=4, sink=sink), truth)
    assert torch.equal(
        radial.radial_map(geometry, decay=decay, block=4, shrink="any", sink=sink), any_of_blocks(truth, 4)
    )


@pytest.mark.parametrize("geometry", GRIDS, ids=str)
def test_strict_radial_is_within_any_and_drops_no_row(geometry: Geometry) -> None:
    for block, sink in itertools.product((4, 16), (False, True)):
        every = radial.radial_map(geometry, block=block, shrink="any", sink=sink)
        assert not bool((radial.radial_map(geometry, block=block, sink=sink) & ~every).any())
        covers(radial.radial_plan(geometry, block=block, sink=sink), geometry)


@pytest.mark.parametrize(
    ("geometry", "decay", "every", "strict"),
    [
        (WAN_720P, 1.0, 0.438, 0.396),
        (WAN_720P, 0.2, 0.302, 0.262),
        (Geometry(18, 48, 80, frame_sink=True), 0.2, 0.299, 0.287),
        (Geometry(33, 45, 80), 0.95, 0.317, 0.270),
    ],
)
def test_radial_densities_of_real_sizes(geometry: Geometry, decay: float, every: float, strict: float) -> None:
    """Figures of the specification; 720p ends in a short block, which upstream cannot do."""
    sink = geometry.frame_sink
    maps = [radial.radial_map(geometry, decay=decay, shrink=shrink, sink=sink) for shrink in ("any", "strict")]
    assert [round(float(kept.double().mean()), 3) for kept in maps] == [every, strict]
    if geometry == WAN_720P and decay == 1.0:
        assert maps[0].numel() == 349_281 and int((maps[0] & ~maps[1]).sum()) == 14_692
        assert bool(maps[1].diagonal().all()) and bool(maps[1].any(1).all())


# ---- sliding tiles --------------------------------------------------------------------------------------------------


def test_window_is_clamped_at_the_borders() -> None:
    for count, window in itertools.product(range(1, 7), range(1, 9)):
        kept = sta.axis_map(count, window)
        half = window // 2
        for q, kv in itertools.product(range(count), repeat=2):
            centre = min(max(q, half), count - 1 - half)
            assert bool(kept[q, kv]) == (abs(centre - kv) <= half)
        assert kept.sum(1).tolist() == [min(count, 2 * half + 1)] * count


@pytest.mark.parametrize(
    ("grid", "window", "percent"),
    [((5, 6, 10), (3, 3, 3), 9.0), ((5, 6, 10), (5, 5, 5), 41.67), ((3, 6, 10), (3, 5, 5), 41.67)],
)
def test_published_densities_of_tiles(grid: sta.Three, window: sta.Three, percent: float) -> None:
    tile = (6, 8, 8)
    f, h, w = (n * t for n, t in zip(grid, tile, strict=True))
    plan = sta.tile_plan(Geometry(f, h, w), tile=tile, window=window)
    assert round(100 * plan.density, 2) == percent


def test_tiles_of_real_and_awkward_grids() -> None:
    assert sta.choose_tile(WAN_720P) == (3, 5, 8)
    for window, percent in (((3, 3, 3), 4.3), ((5, 5, 5), 19.8), ((7, 5, 5), 27.8)):
        assert round(100 * sta.tile_plan(WAN_720P, tile=(3, 5, 8), window=window).density, 1) == percent
    assert sta.choose_tile(Geometry(1, 4, 4)) == (1, 4, 4)
    ragged = sta.choose_tile(Geometry(13, 17, 31))  # primes: no tile divides it
    assert 64 < ragged[0] * ragged[1] * ragged[2] <= 128


@pytest.mark.parametrize("grid", [(3, 5, 7), (8, 7, 13), (1, 4, 4), (2, 9, 9)])
def test_ragged_tiles_hold_every_token_once(grid: sta.Three) -> None:
    """FastVideo#620 (C50): a grid that is no multiple of the tile (4, 4, 4)."""
    geometry, tile = Geometry(*grid, text=5), (4, 4, 4)
    plan = sta.tile_plan(geometry, tile=tile, window=(1, 3, 1), block=16)
    covers(plan, geometry)
    order = plan.queries.order
    assert order is not None
    assert torch.equal(order.argsort()[order], torch.arange(geometry.tokens))  # undone by its inverse
    mask = plan.token_mask()
    place = torch.stack(torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")).flatten(1) // 4
    for a, b in itertools.product(range(0, geometry.video, 7), range(0, geometry.video, 5)):
        near = all(
            bool(sta.axis_map(-(-n // 4), k)[place[i, a], place[i, b]])
            for i, (n, k) in enumerate(zip(grid, (1, 3, 1), strict=True))
        )
        assert bool(mask[a, b]) == near


# ---- Sparse VideoGen ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", GRIDS, ids=str)
@pytest.mark.parametrize("sink", [False, True])
def test_spatial_and_temporal_bands(geometry: Geometry, sink: bool) -> None:
    block, half = 8, 16
    plan = svg.spatial_plan(geometry, half, block=block, sink=sink)
    covers(plan, geometry)
    assert torch.equal(plan.block_mask(), any_of_blocks(svg.band_token_mask(geometry, half, sink=sink), block))
    across = svg.temporal_plan(geometry, half, block=block, sink=sink)
    covers(across, geometry)
    tokens = svg.band_token_mask(geometry, half, sink=sink, temporal=True)
    assert not bool((tokens & ~across.token_mask()).any())  # no pair of the band is lost
    order = svg.place_order(geometry)
    place = torch.empty_like(order).index_put_((order,), torch.arange(len(order)))
    reach = (place[:, None] - place[None]).abs() < half + 2 * block  # and none is farther than the blocks that hold it
    start = layout.video_start(geometry)
    video = slice(start, start + geometry.video)
    held = across.token_mask()[video, video]
    first = (place < geometry.frame + block) if sink else torch.zeros_like(place, dtype=torch.bool)
    assert not bool((held & ~reach & ~first[None]).any())


@pytest.mark.parametrize("geometry", [GRIDS[0], GRIDS[2], Geometry(1, 4, 4), Geometry(9, 4, 8)], ids=str)
def test_the_sink_of_temporal_heads_can_be_frame_0_itself(geometry: Geometry) -> None:
    plan = svg.temporal_plan(geometry, 8, block=8, sink=True, sink_mode="frame0")
    covers(plan, geometry)
    start = layout.video_start(geometry)
    assert bool(plan.token_mask()[:, start : start + geometry.frame].all())
    lost = svg.band_token_mask(geometry, 8, temporal=True) & ~plan.token_mask()
    assert not bool(lost.any())
    if geometry.frames > 8:  # upstream's sink is a few places of all frames instead
        reference = svg.temporal_plan(geometry, 8, block=8, sink=True)
        assert not bool(reference.token_mask()[:, start : start + geometry.frame].all())


def heads_of_both_kinds(geometry: Geometry) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of two heads: one looks at its own frame, one at its own place in all frames."""
    frame = torch.arange(geometry.video) // geometry.frame
    place = torch.arange(geometry.video) % geometry.frame
    codes = [torch.nn.functional.one_hot(index, 64).float() * 20 for index in (frame, place)]
    q = torch.stack(codes)[None]
    v = torch.randn(1, 2, geometry.video, 64, generator=torch.Generator().manual_seed(0))
    return q, q.clone(), v


@pytest.mark.parametrize("with_v", [True, False])
def test_heads_are_told_apart(with_v: bool) -> None:
    geometry = Geometry(12, 6, 8)
    q, k, v = heads_of_both_kinds(geometry)
    plans = (svg.spatial_plan(geometry, 96, block=16), svg.temporal_plan(geometry, 96, block=16))
    rows = svg.sample_rows(geometry, 32, 0)
    values = v if with_v else None
    assert svg.classify(q, k, values, plans, rows).tolist() == [[0, 1]]
    swapped = svg.classify(q.flip(1), k.flip(1), values, plans, rows)
    assert swapped.tolist() == [[1, 0]]


def test_rows_are_sampled_from_the_whole_video_and_the_same_again() -> None:
    """Upstream draws from the first 10000 tokens: three frames of 720p."""
    rows = svg.sample_rows(WAN_720P, 64, seed=3)
    assert torch.equal(rows, svg.sample_rows(WAN_720P, 64, seed=3))
    assert not torch.equal(rows, svg.sample_rows(WAN_720P, 64, seed=4))
    assert len(rows.unique()) == 64 and int(rows.max()) > 60_000 and int(rows.min()) < 15_000
    late = svg.sample_rows(Geometry(3, 4, 4, text=10, text_first=True), 1000, seed=0)
    assert late.sort().values.tolist() == list(range(10, 58))


# ---- densities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.15, 0.3, 0.5])
@pytest.mark.parametrize("geometry", [Geometry(24, 8, 16, text=20), Geometry(9, 13, 11, frame_sink=True)], ids=str)
def test_parameters_found_for_a_density_keep_within_it(geometry: Geometry, density: float) -> None:
    sink, block = geometry.frame_sink, 16
    half = svg.half_width_for(geometry, density, block=block, sink=sink)
    kept = svg.spatial_plan(geometry, half, block=block, sink=sink).density
    wider = svg.spatial_plan(geometry, half + block, block=block, sink=sink).density
    assert kept <= density < wider
    tile = sta.choose_tile(geometry, block)
    window = sta.choose_window(geometry, tile, density)
    assert sta.tile_plan(geometry, tile=tile, window=window, block=block).density <= density
    decay = radial.decay_for(geometry, density, block=block, sink=sink)
    found = radial.radial_plan(geometry, decay=decay, block=block, sink=sink).density
    least = radial.radial_plan(geometry, decay=2**-8, block=block, sink=sink).density
    assert found <= max(density, least)
    if found > least:
        assert radial.radial_plan(geometry, decay=decay * 1.05, block=block, sink=sink).density > density


def test_everything_is_one_full_plan() -> None:
    plans = layout.full(300)
    assert plans.density == 1.0 and plans.plans[0].queries.count == 3


# ---- clusters and pooled scores -------------------------------------------------------------------------------------


def test_kmeans_ends_where_lloyd_ends() -> None:
    generator = torch.Generator().manual_seed(0)
    middles = 10 * torch.randn(2, 4, 6, generator=generator)
    home = torch.randint(4, (2, 80), generator=generator)
    x = middles.gather(1, home[..., None].expand(-1, -1, 6)) + 0.1 * torch.randn(2, 80, 6, generator=generator)
    labels, centroids, sizes = svg2.kmeans(x, 4, 30, start=middles + 0.5)
    assert torch.equal(labels, home) and torch.equal(labels, torch.cdist(x, centroids).argmin(-1))
    for n, c in itertools.product(range(2), range(4)):
        assert torch.allclose(centroids[n, c], x[n, home[n] == c].mean(0), atol=1e-4)
        assert int(sizes[n, c]) == int((home[n] == c).sum())
    again, _, _ = svg2.kmeans(x, 4, 1, start=centroids)  # warm: one pass is enough
    assert torch.equal(again, labels)


@pytest.mark.parametrize("geometry", [Geometry(3, 5, 7), Geometry(4, 4, 4, text=10, text_first=True)], ids=str)
def test_clusters_hold_every_token_and_keep_to_the_cap(geometry: Geometry) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 3, geometry.tokens, 8, generator=generator)
    options = {"clusters": (6, 12), "block": 4}
    plans, warm = svg2.cluster_plans(geometry, q, k, top_p=0.9, density=0.5, **options)
    assert plans.assign is not None and plans.assign.tolist() == [[0, 1, 2]]
    for plan in plans.plans:
        covers(plan, geometry)
        text = 1 - geometry.video**2 / geometry.tokens**2
        assert plan.density <= max(0.5, text + 0.2)
    free, _ = svg2.cluster_plans(geometry, q, k, top_p=0.9, warm=warm, iterations=2, **options)
    assert free.density > plans.density
    everything, _ = svg2.cluster_plans(geometry, q, k, top_p=1.0, **options)
    assert everything.density == pytest.approx(1.0)


def test_a_row_keeps_the_cluster_that_crosses_top_p() -> None:
    weights = torch.tensor([[[0.1, 0.5, 0.15, 0.25]]])
    assert svg2.top_map(weights, 0.6)[0, 0].tolist() == [False, True, False, True]
    assert svg2.top_map(weights, 0.01)[0, 0].tolist() == [False, True, False, False]
    assert svg2.top_map(weights, 0.01, min_kc_ratio=0.5)[0, 0].tolist() == [False, True, False, True]
    capped = svg2.top_map(weights, 0.99, sizes=torch.tensor([[1, 5, 2, 2]]), density=0.6)
    assert capped[0, 0].tolist() == [False, True, False, False]


def test_pooled_means_go_by_true_lengths_and_the_best_blocks_are_kept() -> None:
    geometry = Geometry(3, 5, 7, text=6)
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 2, 2, geometry.tokens, 8, generator=generator)
    blocks, video = sta.tiles(geometry, 16, (2, 4, 2))
    assert blocks.order is not None
    pieces = [blocks.order[a:b] for a, b in itertools.pairwise(blocks.starts.tolist())]
    means = [torch.stack([x[:, :, piece].mean(2) for piece in pieces], 2) for x in (q, k)]
    assert torch.allclose(topk.pooled(k, blocks), means[1], atol=1e-6)
    plans = topk.top_block_plans(geometry, q, k, count=3, block=16, tile=(2, 4, 2))
    scores = means[0][:, :, video] @ means[1][:, :, video].transpose(-1, -2)
    for index, plan in enumerate(plans.plans):
        covers(plan, geometry)
        kept = plan.block_mask()[video, video]
        assert kept.sum(1).tolist() == [3] * len(kept)
        each = scores.flatten(0, 1)[index]
        least, most = each.masked_fill(~kept, torch.inf).min(1), each.masked_fill(kept, -torch.inf).max(1)
        assert bool((least.values >= most.values).all())
