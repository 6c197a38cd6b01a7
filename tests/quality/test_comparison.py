"""`compare`: which metrics, in what order, as what, and what JSON makes of it."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch

from diffaccel.errors import InvalidOptionError
from diffaccel.quality import compare, jsonable, max_error, mse, psnr, ssim

OURS = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
THEIRS = (OURS + 0.1).clamp(0, 1)


def test_default_metrics_equal_the_single_functions():
    assert compare(OURS, THEIRS) == {"psnr": psnr(OURS, THEIRS), "ssim": ssim(OURS, THEIRS)}


def test_metrics_come_in_the_order_asked_for():
    scores = compare(OURS, THEIRS, metrics=("max_error", "mse"))
    assert list(scores.items()) == [("max_error", max_error(OURS, THEIRS)), ("mse", mse(OURS, THEIRS))]
    assert all(type(value) is float for value in scores.values())


def test_one_name_alone_will_do():
    assert compare(OURS, THEIRS, metrics="mse") == {"mse": mse(OURS, THEIRS)}


@pytest.mark.parametrize(("wrong", "near"), [("pnsr", "psnr"), ("sim", "ssim"), ("maxerror", "max_error")])
def test_unknown_metric_names_the_nearest(wrong, near):
    with pytest.raises(InvalidOptionError, match=f"{wrong!r}: did you mean {near!r}"):
        compare(OURS, THEIRS, metrics=("psnr", wrong))


def test_unknown_metric_without_a_near_one_lists_all():
    with pytest.raises(InvalidOptionError, match="colour_shift, flicker_rise, lpips, max_error, motion_psnr") as error:
        compare(OURS, THEIRS, metrics=["qqqq"])
    assert "did you mean" not in str(error.value)


def test_shapes_are_checked_even_without_metrics():
    with pytest.raises(InvalidOptionError, match="shape"):
        compare(OURS, THEIRS[:1], metrics=())


def test_json_form_of_identical_pictures():
    scores = compare(OURS, OURS)
    assert scores["psnr"] == math.inf
    safe = jsonable(scores)
    assert safe["psnr"] is None and safe["ssim"] == pytest.approx(1)
    assert json.loads(json.dumps(safe, allow_nan=False)) == safe
    with pytest.raises(ValueError):
        json.dumps(scores, allow_nan=False)  # why jsonable exists


def test_importing_the_package_does_not_import_torch():
    code = (
        "import sys, diffaccel.quality as q; dir(q); assert 'torch' not in sys.modules;"
        "q.compare; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_attribute_is_an_attribute_error():
    import diffaccel.quality

    with pytest.raises(AttributeError, match="vmaf"):
        _ = diffaccel.quality.vmaf


def test_bench_and_sweep_are_found_here_too():
    import diffaccel.bench
    import diffaccel.quality

    assert diffaccel.quality.bench is diffaccel.bench.bench and diffaccel.quality.sweep is diffaccel.bench.sweep
