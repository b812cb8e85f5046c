"""The rows of the suite `kernels`, on a CPU and a clock that stands still."""

from functools import partial

import pytest

from faback.bench import kernels
from faback.bench.cases import decode
from faback.bench.problem import Problem


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    def timed(call):
        call()
        return 1.0

    monkeypatch.setattr(kernels, "graph_us", timed)
    monkeypatch.setattr(kernels, "Problem", partial(Problem, device="cpu"))


def test_a_row_has_the_cost_of_determinism():
    row = kernels.measure(decode(2, 100, 5.0), ["reference"])
    assert row["reference_us"] == row["reference_deterministic_us"] == 1.0
    assert 0 < row["reference_error"] < 0.01 and 0 < row["reference_deterministic_error"] < 0.01
    assert row["target_us"] == 5.0 and "fa3_us" not in row


def test_a_kernel_that_is_wrong_has_no_figure(monkeypatch):
    monkeypatch.setattr(kernels, "ERROR_BOUND", 0.0)
    row = kernels.measure(decode(1, 20, None), ["reference"])
    assert "reference_us" not in row and "relative error" in row["reference_failed"]
    assert "relative error" in row["reference_deterministic_failed"]
