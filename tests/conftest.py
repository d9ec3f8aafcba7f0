"""What every test starts from."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hookline.hooks.registry import HookRegistry


@pytest.fixture(autouse=True, scope="session")
def compiling_has_been_said() -> None:
    """The warnings that compiled code calls no function hooks come once per process, whichever test compiles first.

    It is tested in processes of its own (tests/sites/functions/test_kernels.py).
    """
    from hookline.sites.functions import kernels, mode

    kernels._Said.compiling = True
    mode._Said.compiled = True


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises, also where whoever started the tests has it ignored, as a shell does in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> type[HookRegistry]:
    """A registry with nothing in it, without the entry points of this machine; the real one is back afterwards."""
    from hookline.hooks.registry import HookRegistry

    for name in ("_classes", "_paths", "groups", "_entry_points", "_broken"):
        monkeypatch.setattr(HookRegistry, name, {})
    return HookRegistry
