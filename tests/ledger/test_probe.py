"""The probe of this processor: work is counted, time is what the clock says."""

from __future__ import annotations

from typing import Any

import pytest

from diffaccel import InvalidOptionError
from diffaccel.cli import main
from diffaccel.ledger import estimate
from diffaccel.ledger import probe as module
from diffaccel.ledger.probe import probe


class Bench:
    """Work that takes the time it is told to take, on a clock of its own."""

    def __init__(self) -> None:
        self.took = {"float32": 0.5, "bfloat16": 0.25, "copy": 0.125}
        self.now, self.calls = 100.0, dict.fromkeys(self.took, 0)

    def clock(self) -> float:
        return self.now

    def _do(self, what: str) -> None:
        self.now += self.took[what]
        self.calls[what] += 1

    def multiply(self, dtype: str) -> int:
        self._do(dtype)
        return 10**12

    def copy(self) -> int:
        self._do("copy")
        return 10**9


def test_rates_are_work_over_time() -> None:
    bench = Bench()
    found = probe(5.0, bench.clock, bench)
    assert found.bf16_tflops == pytest.approx(4.0) and found.bandwidth_gb_s == pytest.approx(8.0)
    assert (found.name, found.kind) == ("cpu", "cpu") and (found.memory_gib or 0) > 0
    assert bench.calls == {"float32": 1 + 4, "bfloat16": 1 + 8, "copy": 1 + 8}  # 2, 2 and 1 s, and a first time each
    assert bench.now - 100.0 == pytest.approx(5.0 + 0.5 + 0.25 + 0.125)


def test_the_faster_dtype_counts() -> None:
    bench = Bench()
    bench.took["bfloat16"] = 2.0
    assert probe(1.0, bench.clock, bench).bf16_tflops == pytest.approx(2.0)


def test_seconds_follow_from_it() -> None:
    bench = Bench()
    found = probe(5.0, bench.clock, bench)
    seconds = estimate("sdxl", hardware=found).seconds
    assert seconds is not None and seconds.basis == "no source: scaled by the peak" and seconds.low < seconds.total
    assert estimate("sdxl", hardware="cpu").seconds is None


def test_real_work_is_what_it_counts() -> None:
    """One product and one copy of torch's, without a clock."""
    work = module._Torch()
    assert work.multiply("bfloat16") == work.multiply("float32") == 2 * 1024**3
    assert float(work._results["float32"][0, 0]) == 1024 and work.copy() == 2 * 64 * 2**20


def test_the_verb_probes_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    bench = Bench()
    monkeypatch.setattr(module, "probe", lambda: probe(5.0, bench.clock, bench))
    assert main(["ledger", "sdxl", "--hardware", "cpu", "--probe"]) == 0
    assert "of 4 TFLOP/s in bf16" in capsys.readouterr().out
    assert main(["ledger", "sdxl", "--hardware", "cpu"]) == 0
    assert "--probe measures this one in 5 s" in capsys.readouterr().out
    for words, said in ((["--hardware", "h100", "--probe"], "h100 is in the table"), (["--probe"], "--hardware cpu")):
        assert main(["ledger", "sdxl", *words]) == 1
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [0, -1, True, "5", 10**6])
def test_refusals(seconds: Any) -> None:
    with pytest.raises(InvalidOptionError, match="seconds must be above 0"):
        probe(seconds)
