"""Every plan whose cost is measured is a plan that works."""

import pytest

from faback.bench.builds import BUILDS


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.name)
@pytest.mark.parametrize("requests", [1, 3])
def test_it_answers(build, requests):
    made = build.make(requests, "reference", "cpu")
    answer = made.answer(made.plan())
    assert answer.shape[0] == made.rows
    assert answer.isfinite().all() and answer.any()


def test_names_tell_them_apart():
    assert len({build.name for build in BUILDS}) == len(BUILDS)
