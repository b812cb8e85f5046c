"""Benchmark cases are right problems: on a small scale, the reference kernel solves each within rounding."""

import attrs
import pytest
import torch

from faback.bench.cases import CASES, Case
from faback.bench.problem import Problem
from faback.bench.writes import written
from faback.kernels.torch_ops import TorchOps

SMALL = (
    Case("decode", ((40, 1), (7, 1), (99, 1))),
    Case("window", ((40, 1), (70, 1)), window=15),
    Case("fp8", ((40, 1), (7, 1)), fp8=True),
    Case("tree", ((40, 6), (7, 6)), tree=True),
    Case("prefill", ((0, 50),)),
    Case("extend", ((30, 20), (5, 9))),
    Case("latent", ((40, 1), (7, 1)), latent=16),
)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_reference_solves_it(case, page_size):
    problem = Problem(attrs.evolve(case, page_size=page_size), "cpu")
    assert problem.error(problem.run(problem.backend("reference"))) < 0.01


@pytest.mark.parametrize("case", [case for case in SMALL if case.lens[0][0]], ids=lambda case: case.name)
def test_a_step_of_several_layers_is_judged_by_the_last(case):
    problem = Problem(case, "cpu", layers=3)
    backend = problem.backend("reference")
    assert problem.error(problem.step(backend)) < 0.01
    first = problem.layers[0]
    assert problem.error(lambda: backend.forward(problem.q, problem.k, problem.v, first, out=problem.out)) > 0.1


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_wrong_answer_is_noticed(case):
    problem = Problem(case, "cpu")
    run = problem.run(problem.backend("reference"))
    assert problem.error(lambda: (run(), problem.out.mul_(1.05))) > 0.03


def test_a_row_that_is_not_written_is_noticed():
    problem = Problem(SMALL[0], "cpu")
    with pytest.raises(AssertionError, match="not written"):
        problem.error(lambda: None)


def test_live_bytes():
    heads, dim = 8, 128
    assert Problem(SMALL[0], "cpu").live_bytes() == (41 + 8 + 100) * heads * 2 * dim * 2
    assert Problem(SMALL[1], "cpu").live_bytes() == 2 * 16 * heads * 2 * dim * 2
    assert Problem(SMALL[2], "cpu").live_bytes() == (41 + 8) * heads * 2 * dim
    assert Problem(SMALL[6], "cpu").live_bytes() == (41 + 8) * 576 * 2


def test_names_tell_cases_apart():
    assert len({case.name for case in CASES}) == len(CASES)


def test_timing_needs_a_gpu():
    from typer.testing import CliRunner

    from faback.cli import build_app

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    result = CliRunner().invoke(build_app(), ["bench"])
    assert result.exit_code == 2 and "a CUDA GPU" in result.output


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, None), (torch.float8_e4m3fn, 0.5)])
def test_a_write_is_looked_at(dtype, scale):
    where = torch.device("cpu")
    written(TorchOps(), 64, dtype, scale, where)()

    class Elsewhere(TorchOps):
        def set_kv(self, k, v, k_cache, v_cache, write, *scales):
            super().set_kv(k, v.flip(0), k_cache, v_cache, write, *scales)

    with pytest.raises(ArithmeticError, match="something else"):
        written(Elsewhere(), 64, dtype, scale, where)
