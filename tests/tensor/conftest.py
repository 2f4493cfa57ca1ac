"""Fixtures of this folder: each test sees every warning anew."""

import pytest

from nf4tensor.tensor import fallback


@pytest.fixture(autouse=True)
def _warn_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fallback, "_warned", set())
