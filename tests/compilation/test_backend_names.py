"""A misspelt compile backend is an error like any other misspelling, and not a lever that is left out."""

from __future__ import annotations

from typing import Any

import pytest

from diffaccel import InvalidOptionError, accelerate, attach, plan
from diffaccel.compilation.regional import RegionalCompile
from tests import tiny


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny.build("flux")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("inductr", "inductor"), ("Inductor", "inductor"), ("eagre", "eager"), ("aot-eager", "aot_eager")],
)
def test_raised_by_name(pipe: Any, wrong: str, right: str) -> None:
    for call in (
        lambda: accelerate(pipe, None, compile=True, compile_backend=wrong),
        lambda: plan(pipe, None, compile=True, compile_backend=wrong),
        lambda: attach(pipe).enable_compile(backend=wrong),
        lambda: RegionalCompile(backend=wrong),
    ):
        with pytest.raises(InvalidOptionError) as error:
            call()
        assert repr(right) in str(error.value) and repr(wrong) in str(error.value)
        assert len(str(error.value)) <= 300


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backends_that_there_are(pipe: Any, backend: str) -> None:
    """The negative control."""
    assert plan(pipe, None, compile=True, compile_backend=backend).enabled == ("compile",)
