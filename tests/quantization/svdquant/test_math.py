"""The mathematics against closed forms: formats, smoothing, branch, correction of the bias."""

from __future__ import annotations

import itertools

import pytest
import torch

from diffaccel.quantization.svdquant.formats import (
    E2M1,
    GROUP,
    PRECISIONS,
    SHIFT,
    code_values,
    e2m1_codes,
    pack_nibbles,
    quantize_activation,
    quantize_weight,
    unpack_nibbles,
)
from diffaccel.quantization.svdquant.math import (
    Layer,
    Part,
    Recipe,
    corrected_bias,
    decompose,
    effective_weight,
    forward_part,
    low_rank,
    quantize_layer,
    quantize_part,
    reference_forward,
    shift_correction,
    smoothing,
)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outliers(rows: int = 96, columns: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight with large rows and inputs with large channels, as in `benchmarks/svdquant.py`."""
    spectrum = torch.arange(1, 97).float() ** -0.7
    weight = (draw(rows, 96, seed=1) * spectrum) @ draw(96, columns, seed=2) / 10
    weight[:2] *= 8
    x = draw(300, columns, seed=3)
    x[:, [5, 77]] *= 40
    return weight, x


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


# ---- formats -----------------------------------------------------------------------------------------


def test_nibbles_hold_two_codes():
    codes = torch.arange(16).repeat(2, 3)
    packed = pack_nibbles(codes)
    assert packed[0, 0] == 0x10  # the low nibble is the even column
    assert torch.equal(unpack_nibbles(packed), codes.to(torch.uint8))


def test_e2m1_takes_the_nearest_number():
    x = torch.linspace(-7, 7, 4001)
    table = torch.tensor([*E2M1, *(-v for v in E2M1)])
    nearest = (x[:, None] - table).abs().min(1).values
    torch.testing.assert_close((code_values(e2m1_codes(x), "nvfp4") - x).abs(), nearest)


def test_e2m1_ties_go_to_the_even_code():
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1)])
    assert e2m1_codes(middles).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert e2m1_codes(-middles).tolist() == [0, 10, 10, 12, 12, 14, 14]


def test_int4_codes_are_twos_complement():
    assert code_values(torch.arange(16, dtype=torch.uint8), "int4").tolist() == [*range(8), *range(-8, 0)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("columns", [64, 200, 7])
def test_weights_are_within_half_a_step(precision, columns):
    weight = draw(24, columns)
    weight[3] = 0
    weight[4] *= 1e-12
    codes = quantize_weight(weight, precision)
    error = (codes.dequantize() - weight).abs()
    step = codes.float_scales().repeat_interleave(GROUP[precision], 1)[:, :columns]
    # INT4: half a step, and 0.4 % of the 7 steps that a bf16 scale is off; E2M1: its coarsest step is 2
    assert bool((error <= step * (0.5 + 7 * 2**-8 if precision == "int4" else 1.2)).all())
    assert bool((codes.dequantize()[3] == 0).all())
    assert codes.packed.dtype == torch.uint8 and codes.packed.shape[1] * 2 % GROUP[precision] == 0


@pytest.mark.parametrize(("precision", "unsigned"), [("int4", False), ("int4", True), ("nvfp4", False)])
def test_activations_are_quantized_per_token_and_group(precision, unsigned):
    x = draw(3, 5, 130).abs() if unsigned else draw(3, 5, 130)
    kept = quantize_activation(x, precision, unsigned)
    assert kept.shape == x.shape
    group = GROUP[precision]
    alone = quantize_activation(x[1, 2:3, :group], precision, unsigned)
    assert torch.equal(kept[1, 2:3, :group], alone)
    levels = len(torch.unique(kept[0, 0, :group]))
    assert levels <= (16 if precision == "int4" else 15)
    assert distance(kept, x) < (0.06 if unsigned else 0.13)


def test_unsigned_activations_have_twice_the_levels():
    x = torch.nn.functional.gelu(draw(200, 128)) + SHIFT
    assert distance(quantize_activation(x, "int4", True), x) < 0.6 * distance(quantize_activation(x, "int4"), x)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_zeros_and_huge_values_stay_finite(precision):
    x = torch.zeros(2, 128)
    assert bool((quantize_activation(x, precision) == 0).all())
    x[0, 0] = 3e5
    assert bool(torch.isfinite(quantize_activation(x, precision)).all())


# ---- smoothing and branch -------------------------------------------------------------------------------


def test_smoothing_formula_and_its_gaps():
    s = smoothing(torch.tensor([4.0, 0.0, 2.0, torch.inf]), torch.tensor([1.0, 1.0, 0.0, 1.0]), 0.5)
    assert s.tolist() == [2.0, 1.0, 1.0, 1.0]


def test_high_svd_is_the_best_of_its_rank():
    matrix = draw(40, 60)
    up, down = low_rank(matrix, 7, "high")
    tail = torch.linalg.svdvals(matrix.double())[7:].norm()
    torch.testing.assert_close((matrix - up @ down).norm().double(), tail, rtol=1e-5, atol=0)


def test_low_svd_is_nearly_the_best_repeatable_and_leaves_the_random_state_alone():
    matrix = outliers()[0]
    state = torch.random.get_rng_state()
    up, down = low_rank(matrix, 16)
    assert torch.equal(torch.random.get_rng_state(), state)
    tail = torch.linalg.svdvals(matrix)[16:].norm()
    assert (matrix - up @ down).norm() < 1.01 * tail
    assert torch.equal(low_rank(matrix, 16)[0], up)
    assert low_rank(matrix, 0)[0].shape == (96, 0) and low_rank(matrix, 999)[0].shape[1] == 96


@pytest.mark.parametrize("precision", PRECISIONS)
def test_codes_and_branch_add_up_to_the_weight(precision):
    weight, x = outliers()
    part, _ = quantize_part(weight, Recipe(precision, alpha=(0.5,)), x.abs().amax(0))
    smooth = part.smooth.float()
    residual = weight * smooth - part.up.float() @ (part.down.float() * smooth)
    torch.testing.assert_close(part.codes.dequantize(), quantize_weight(residual, precision).dequantize())
    whole = effective_weight(Layer((part,), None)) - (part.codes.dequantize() - residual) / smooth
    torch.testing.assert_close(whole, weight, rtol=1e-4, atol=1e-5)


def test_the_branch_reads_the_unsmoothed_input():
    weight, x = outliers()
    part, _ = quantize_part(weight, Recipe(alpha=(0.5,)), x.abs().amax(0))
    truth = x @ weight.T
    assert distance(forward_part(x, part), truth) < 0.05
    forgot = Part(part.codes, part.smooth, part.down * part.smooth, part.up)
    assert distance(forward_part(x, forgot), truth) > 0.5


def test_scaling_a_channel_and_its_weights_changes_nothing():
    """x_k * c and W_:k / c are the same layer; with c a power of two, to the last bit."""
    weight, x = outliers()
    c = 2.0 ** torch.randint(-3, 4, (128,), generator=torch.Generator().manual_seed(0)).float()
    recipe = Recipe(alpha=(0.5,), svd="high")
    one, _ = quantize_part(weight, recipe, x.abs().amax(0))
    two, _ = quantize_part(weight / c, recipe, (x * c).abs().amax(0))
    torch.testing.assert_close(two.smooth.float(), one.smooth.float() * c, rtol=2**-8, atol=0)
    torch.testing.assert_close(forward_part(x * c, two), forward_part(x, one), rtol=1e-3, atol=1e-2)


# ---- the unsigned path ----------------------------------------------------------------------------------


def test_the_bias_takes_the_shift_back_exactly():
    weight, bias = draw(32, 128), draw(32, seed=9)
    x = torch.nn.functional.gelu(draw(50, 128, seed=4))
    layer, _ = quantize_layer(weight, bias, Recipe(alpha=(0.5,)), x.abs().amax(0), None, ((128, True),))
    assert layer.parts[0].unsigned
    wanted = x @ effective_weight(layer).T + bias
    torch.testing.assert_close(reference_forward(x, layer, act=False), wanted, rtol=1e-5, atol=2e-5)
    uncorrected = Layer(layer.parts, bias)
    off = reference_forward(x, uncorrected, act=False) - wanted
    torch.testing.assert_close(off, shift_correction(layer.parts[0]).expand_as(off), rtol=1e-4, atol=1e-4)
    assert float(off.abs().max()) > 0.01  # the correction matters


def test_unsigned_is_better_behind_a_gelu_and_is_for_int4_only():
    weight = draw(64, 256)
    x = torch.nn.functional.gelu(draw(200, 256, seed=4))
    found = {}
    for unsigned in (False, True):
        splits = ((256, unsigned),)
        layer, _ = quantize_layer(weight, None, Recipe(alpha=(0.5,)), x.abs().amax(0), None, splits)
        found[unsigned] = distance(reference_forward(x, layer), x @ weight.T)
    assert found[True] < 0.85 * found[False]
    nvfp4, _ = quantize_layer(weight, None, Recipe("nvfp4"), x.abs().amax(0), None, ((256, True),))
    assert not nvfp4.parts[0].unsigned and nvfp4.bias is None


def test_parts_are_layers_side_by_side():
    weight, bias, x = draw(48, 200), draw(48, seed=5), draw(20, 200, seed=6)
    x[:, 64:] = torch.nn.functional.gelu(x[:, 64:])
    layer, alphas = quantize_layer(weight, bias, Recipe(), x.abs().amax(0), x, ((64, False), (136, True)))
    assert len(layer.parts) == len(alphas) == 2 and (layer.in_features, layer.out_features) == (200, 48)
    alone = [forward_part(x[:, :64], layer.parts[0]), forward_part(x[:, 64:], layer.parts[1])]
    torch.testing.assert_close(reference_forward(x, layer), alone[0] + alone[1] + corrected_bias(bias, layer.parts))
    assert distance(reference_forward(x, layer), x @ weight.T + bias) < 0.15
    with pytest.raises(ValueError, match="cover 64"):
        quantize_layer(weight, bias, Recipe(), None, None, ((64, False),))


# ---- the whole ------------------------------------------------------------------------------------------


def test_outliers_make_the_difference():
    """With outliers SVDQuant beats rounding of weights alone; without, it does not (so tests must have them)."""

    def errors(weight: torch.Tensor, x: torch.Tensor) -> tuple[float, float, float]:
        truth = x @ weight.T
        layer, _ = quantize_layer(weight, None, Recipe(alpha=(0.5,), rank=16), x.abs().amax(0))
        plain = quantize_weight(weight, "int4").dequantize()
        naive = quantize_activation(x, "int4") @ plain.T
        return distance(reference_forward(x, layer), truth), distance(x @ plain.T, truth), distance(naive, truth)

    ours, rounding, naive = errors(*outliers())
    assert ours < 0.5 * rounding and ours < 0.5 * naive
    ours, rounding, _ = errors(draw(96, 128), draw(300, 128, seed=3))
    assert ours > rounding


def test_a_search_is_as_good_as_its_best_alpha_and_refining_never_worse():
    weight, x = outliers()
    top, truth = x.abs().amax(0), x @ weight.T
    alphas = (0.2, 0.5, 0.8)
    each = {a: distance(forward_part(x, quantize_part(weight, Recipe(alpha=(a,)), top, x)[0]), truth) for a in alphas}
    part, alpha = quantize_part(weight, Recipe(alpha=alphas), top, x)
    assert each[alpha] == min(each.values()) == distance(forward_part(x, part), truth)
    smooth = smoothing(top, weight.abs().amax(0), 0.5)
    plain = distance(forward_part(x, decompose(weight, smooth, Recipe(), sample=x)), truth)
    assert distance(forward_part(x, decompose(weight, smooth, Recipe(refine=3), sample=x)), truth) <= plain


@pytest.mark.parametrize("precision", ["int4", "nvfp4"])
@pytest.mark.parametrize("spectrum", [False, True])
def test_refining_takes_error_off_inputs_that_were_not_seen(precision: str, spectrum: bool):
    """A tenth of the error at least where only weights are quantized, a hundredth where activations are too."""
    weight, x = outliers()
    if spectrum:
        u, _, v = torch.linalg.svd(weight, full_matrices=False)
        weight = u * torch.arange(1, u.shape[1] + 1).float() ** -0.7 @ v
    seen, held = x[::2], x[1::2]
    truth = held @ weight.T
    found = {}
    for refine in (0, 1, 3):
        recipe = Recipe(precision, rank=16, alpha=(0.5,), refine=refine)
        part, _ = quantize_part(weight, recipe, seen.abs().amax(0), seen)
        found[refine] = [distance(forward_part(held, part, act), truth) for act in (False, True)]
    assert found[3][0] < 0.9 * found[0][0] and found[3][1] < 0.99 * found[0][1]
    assert found[3][0] < found[1][0] < found[0][0]


def test_without_calibration_nothing_is_smoothed():
    part, alpha = quantize_part(outliers()[0], Recipe())
    assert alpha is None and bool((part.smooth == 1).all())
