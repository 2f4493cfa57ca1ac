"""Fixtures that every room's tests share."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

from tests.ranks import Ranks


# Eight processes on two cores take their time: slow tests, where fewer show the same.
@pytest.fixture(
    scope="session",
    params=[1, 2, 3, 4, pytest.param(8, marks=pytest.mark.slow)],
    ids=lambda n: f"{n}ranks",
)
def ranks(request: pytest.FixtureRequest):
    """Each world size in turn, started once for all tests that use it."""
    world = Ranks(request.param)
    yield world
    world.stop()
