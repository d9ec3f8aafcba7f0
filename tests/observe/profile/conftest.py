"""Fixtures of the tests of ``profile``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers_profile import STOPWATCH, Stopwatch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are tiny, and several threads on a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    monkeypatch.setattr("hookline.observe.profile.profile.clock_for", lambda model: STOPWATCH)
    return STOPWATCH
