"""The reference kernel is the prose of `faback.core.segment`, so that lowerings may be held against it."""

import pytest

from .problems import PAGES, Draw, check_equal


@pytest.mark.parametrize("page", PAGES)
def test_reference_is_the_definition(page):
    for seed in range(25):
        problem = Draw(seed, page).problem()
        check_equal(problem, problem.attend(sinks=problem.sinks))
