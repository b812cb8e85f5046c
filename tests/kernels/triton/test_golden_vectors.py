"""A sample of the recorded scenarios on the Triton kernels in Triton's interpreter; all with GOLDEN_STRIDE=1."""

from __future__ import annotations

import os

import pytest

import test_golden
from golden_data import scenarios
from kernels.triton.interpreter import needs_interpreter

needs_interpreter()

STRIDE = int(os.environ.get("GOLDEN_STRIDE", "8"))
WITHOUT_BATCH = [scenario for scenario in scenarios() if scenario.forward_mode is None]


@pytest.mark.parametrize("scenario", test_golden.WITH_BATCH[::STRIDE], ids=lambda scenario: scenario.name)
def test_scenario_equals_its_oracle(scenario):
    test_golden.test_scenario_equals_its_oracle(scenario, "triton")


@pytest.mark.parametrize("scenario", WITHOUT_BATCH[::STRIDE], ids=lambda scenario: scenario.name)
def test_unabsorbed_mla_equals_its_oracle(scenario):
    test_golden.test_unabsorbed_mla_equals_its_oracle(scenario, "triton")
