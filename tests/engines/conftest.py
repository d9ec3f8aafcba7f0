"""Fixtures of the tests of engines."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from hookline.observe.tokens import current_tokens


@pytest.fixture
def context(monkeypatch):
    found = SimpleNamespace(attn_metadata=None, skip_compiled=False, workers=[])
    monkeypatch.setitem(sys.modules, "vllm.forward_context", SimpleNamespace(get_forward_context=lambda: found))
    yield found
    for worker in found.workers:
        worker.__dict__["_hookline_hooks"].close()
    assert current_tokens() is None
