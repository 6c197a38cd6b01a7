"""The registry of sparse methods: options, densities, what is kept from call to call, and the automatic choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from diffaccel.attention.geometry import Geometry
from diffaccel.attention.kernels.torch_plan import block_sparse
from diffaccel.attention.sparse import svg2
from diffaccel.attention.sparse.registry import METHODS, Query, SparseVideoGen2, auto_method, make_method
from diffaccel.errors import InvalidOptionError

GEOMETRY = Geometry(16, 8, 8, text=12)
LONG = Geometry(32, 12, 12)  # radial attention has a least density, which many frames make small


def q_and_k(geometry: Geometry = GEOMETRY, heads: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, heads, geometry.tokens, 16, generator=generator)
    return q, k


def planned(name: str, seed: int = 0, state: dict[str, Any] | None = None, step: int = 0, **options: Any) -> Any:
    method = make_method(name, block=16, **options)
    q, k = (None, None) if method.static else q_and_k(seed=seed)
    geometry = LONG if name == "radial" else GEOMETRY
    return method.plan(Query(geometry, q, k, layer=1, step=step, state={} if state is None else state))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_density_is_kept_within_and_used(name: str) -> None:
    low, high = planned(name, density=0.35).density, planned(name, density=0.7).density
    assert low <= 0.36 and high <= 0.71 and low < high and high > 0.45


@pytest.mark.parametrize("name", sorted(METHODS))
def test_density_1_is_dense_attention_bit_by_bit(name: str) -> None:
    plans = planned(name, density=1.0)
    q, k = q_and_k(LONG if name == "radial" else GEOMETRY)
    assert plans.density == 1.0 and len(plans.plans) == 1
    assert torch.equal(block_sparse(q, k, k, plans), F.scaled_dot_product_attention(q, k, k))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_same_call_gives_the_same_plans(name: str) -> None:
    first, again = planned(name, density=0.4), planned(name, density=0.4)
    for a, b in zip(first.plans, again.plans, strict=True):
        assert torch.equal(a.indptr, b.indptr) and torch.equal(a.indices, b.indices)
        assert a.queries.order is None or torch.equal(a.queries.order, b.queries.order)
    assert (first.assign is None) == (again.assign is None)
    assert first.assign is None or torch.equal(first.assign, again.assign)


@pytest.mark.parametrize("name", ["radial", "sta", "svg"])
def test_what_hangs_on_the_geometry_alone_is_made_once(name: str) -> None:
    """The same objects, so that a kernel finds what it prepared; another size gets its own."""
    method = make_method(name, density=0.4, block=16)
    q, k = q_and_k()
    first = method.plan(Query(GEOMETRY, q, k)).plans
    later = method.plan(Query(GEOMETRY, q, k, layer=3, step=5)).plans
    assert all(a is b for a, b in zip(first, later, strict=True))
    other = Geometry(8, 8, 8, text=12)
    q, k = q_and_k(other)
    assert method.plan(Query(other, q, k)).plans[0].queries.tokens == other.tokens


def test_svg2_starts_warm_and_anew_for_another_size() -> None:
    state: dict[str, Any] = {}
    planned("svg2", state=state)
    centroids = state["centroids"]
    planned("svg2", state=state, step=1, iterations=1)
    assert state["centroids"] is not centroids
    assert torch.allclose(state["centroids"].keys, centroids.keys, atol=1e-5)  # same tokens: it had ended
    small = Geometry(4, 4, 4)
    q, k = q_and_k(small, heads=3)
    plans = make_method("svg2", block=16).plan(Query(small, q, k, layer=1, step=2, state=state))
    assert len(plans.plans) == 3 and plans.plans[0].queries.tokens == small.tokens


def test_sinks_are_the_family_s_unless_told() -> None:
    wan = Geometry(16, 8, 8, frame_sink=True)
    for name, parameter in (("radial", {"decay": 0.3}), ("svg", {"width_frames": 1.0})):
        plain, sinking = (
            make_method(name, block=16, **parameter).build(g).plans[0] for g in (Geometry(16, 8, 8), wan)
        )
        assert bool(sinking.token_mask()[:, :64].all()) and not bool(plain.token_mask()[:, :64].all())
        off = make_method(name, block=16, sink=False, **parameter).build(wan).plans[0]
        assert torch.equal(off.block_mask(), plain.block_mask())


def test_svg_judges_by_the_output_where_values_are_given() -> None:
    q, k = q_and_k(heads=6, seed=4)
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(9))
    method = make_method("svg", density=0.3, block=16)
    plans = method.plan(Query(GEOMETRY, q, k, v))
    dense = F.scaled_dot_product_attention(q, k, v)
    outputs = [block_sparse(q, k, v, type(plans)((plan,))) for plan in plans.plans]
    errors = torch.stack([(output - dense)[:, :, : GEOMETRY.video].square().mean((2, 3)) for output in outputs])
    assert plans.assign is not None
    agreeing = int((plans.assign == errors.argmin(0)).sum())
    assert agreeing >= 5  # 64 of 1024 rows are looked at


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("radial", {"density": 0}, "density=0: it must be a number above 0 up to 1"),
        ("radial", {"density": 1.5}, "density=1.5"),
        ("radial", {"density": True}, "density=True"),
        ("radial", {"density": 0.5, "decay": 0.2}, "density=0.5 finds decay, so decay=0.2"),
        ("radial", {"decay": -1.0}, "decay=-1.0: it must be a number above 0"),
        ("radial", {"shrink": "anny"}, "did you mean 'any'"),
        ("radial", {"block": 0}, "block=0"),
        ("radial", {"dencity": 0.5}, "radial takes no 'dencity': did you mean 'density'"),
        ("sta", {"window": (3, 3)}, "window=\\(3, 3\\): it must be three whole numbers"),
        ("sta", {"tile": (0, 4, 4)}, "tile="),
        ("sta", {"density": 0.2, "window": (3, 3, 3)}, "density=0.2 finds window"),
        ("svg", {"sink_mode": "frame1"}, "did you mean 'frame0'"),
        ("svg", {"sample_rows": 0}, "sample_rows=0: it must be a whole number of at least 1"),
        ("svg2", {"top_p": 1.2}, "top_p=1.2"),
        ("svg2", {"min_kc_ratio": -0.1}, "min_kc_ratio=-0.1"),
        ("svg2", {"iterations": 1.5}, "iterations=1.5"),
        ("topk", {"count": 3, "density": 0.5}, "density=0.5 finds count"),
        ("radail", {}, "did you mean 'radial'"),
    ],
)
def test_bad_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        make_method(name, **options)


@pytest.mark.parametrize("name", ["svg", "svg2", "topk"])
def test_methods_that_look_at_q_and_k_ask_for_them(name: str) -> None:
    with pytest.raises(InvalidOptionError, match=f"{name} makes its plan from q and k"):
        make_method(name).plan(Query(GEOMETRY))


def test_what_is_found_can_be_read() -> None:
    for name in METHODS:
        found = make_method(name, density=0.4, block=16).describe(LONG)
        assert found and found.get("density", 0.4) <= 0.4
    assert make_method("sta", density=0.2).describe(Geometry(21, 45, 80))["tile"] == (3, 5, 8)


def test_the_choice_goes_by_geometry_and_says_why() -> None:
    names = {}
    for label, geometry in {
        "wan 720p": Geometry(21, 45, 80, frame_sink=True),
        "hunyuan 129 frames": Geometry(33, 45, 80, text=256),
        "long": Geometry(128, 45, 80),
        "short": Geometry(8, 16, 16),
        "one frame": Geometry(1, 64, 64),
    }.items():
        name, why = auto_method(geometry)
        assert name in METHODS and f"{geometry.rows} x {geometry.columns}" in why
        names[label] = name
    assert names == {
        "wan 720p": "radial",
        "hunyuan 129 frames": "radial",
        "long": "radial",
        "short": "svg",
        "one frame": "sta",
    }
    assert auto_method(Geometry(21, 45, 80), density=0.1)[0] == "svg"  # less than radial attention can do there
    assert auto_method(Geometry(128, 45, 80), density=0.11)[0] == "radial"


@pytest.mark.parametrize("geometry", [Geometry(21, 45, 80, frame_sink=True), Geometry(33, 48, 80), LONG], ids=str)
def test_the_least_density_that_the_choice_goes_by_is_the_real_one(geometry: Geometry) -> None:
    told = float(auto_method(geometry, density=1.0)[1].split()[-1])
    real = make_method("radial", density=0.01).build(geometry).density
    assert told == round(real, 2)


def test_svg2_s_first_iterations_are_spread_over_the_dense_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same q and k, 5 dense steps and 2 iterations are the 52 of a cold start, plan for plan."""
    q, k = q_and_k(seed=3)
    rounds: list[int] = []
    plain = svg2.assign
    monkeypatch.setattr(svg2, "assign", lambda x, c: rounds.append(len(c)) or plain(x, c))
    options = {"q_clusters": 12, "k_clusters": 20, "block": 16}
    method, state = SparseVideoGen2(first_iterations=50, iterations=2, **options), {}
    for step in range(5):
        method.warm(Query(GEOMETRY, q, k, layer=1, step=step, state=state), 5)
    assert state["centroids"].iterations == 50
    rounds.clear()
    warm = method.plan(Query(GEOMETRY, q, k, layer=1, step=5, state=state))
    assert len(rounds) <= 2 * 2, "two iterations a side"
    rounds.clear()
    cold = SparseVideoGen2(first_iterations=52, **options).plan(Query(GEOMETRY, q, k, layer=1, step=5))
    assert len(rounds) > 2 * 5, "the negative control: a cold start needs more"
    assert warm.density == cold.density
    for a, b in zip(warm.plans, cold.plans, strict=True):
        assert torch.equal(a.indices, b.indices) and torch.equal(a.indptr, b.indptr)
        assert a.queries.order is not None and b.queries.order is not None
        assert torch.equal(a.queries.order, b.queries.order)


def test_svg2_makes_up_for_dense_steps_that_a_cache_skipped() -> None:
    q, k = q_and_k(seed=3)
    method, state = SparseVideoGen2(q_clusters=12, k_clusters=20, block=16), {}
    method.warm(Query(GEOMETRY, q, k, layer=1, state=state), 5)  # one of five
    method.plan(Query(GEOMETRY, q, k, layer=1, step=5, state=state))
    assert state["centroids"].iterations == 50
    method.plan(Query(GEOMETRY, q, k, layer=1, step=6, state=state))
    assert state["centroids"].iterations == 52
