"""What every test starts from."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers_products import cases
from helpers_warm import SHARED

if TYPE_CHECKING:
    from hookline.lifecycle.registry import HookRegistry

SLOW = tuple((Path(__file__).parent / "slow.txt").read_text(encoding="utf-8").split())
"""What `make test-slow` runs besides the tests that are marked ``slow``: whole files, and tests by name."""
QUICK = "not slow and not full"
"""What `make test` chooses by marks, see pyproject.toml."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out slow files before they are imported: a few of them import transformers and Lightning, for 15 s."""
    path = collection_path.relative_to(Path(__file__).parent.parent).as_posix()
    return True if path in SLOW and config.getoption("markexpr") == QUICK else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `SLOW` before pytest chooses by marks."""
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the cases of ``@pytest.mark.product(kind=KINDS, mode=MODES)``; beyond every pair they are ``full``."""
    for mark in metafunc.definition.iter_markers("product"):
        metafunc.parametrize(tuple(mark.kwargs), cases(mark.kwargs, mark.args[0] if mark.args else 2))


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C raises, also where whoever started the tests has it ignored, as a shell does in the background.

    Workers inherit the folder of `helpers_warm`, so that one process imports torch for all of them. A test or a slow
    file that is named on the command line runs, slow or not.
    """
    if config.option.markexpr == QUICK and any("::" in each or each.endswith(SLOW) for each in config.args):
        config.option.markexpr = ""
    if SHARED not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="hookline-warm-", ignore_cleanup_errors=True)
        os.environ[SHARED] = folder.name
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(lambda: os.environ.pop(SHARED))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_left_alone() -> None:
    """What was there before a file of tests is not looked through at each of its collections.

    Ten thousand collected tests, torch and transformers are 760,000 objects: 0.37 s for every ``gc.collect()``, of
    which there are thousands, and as much for each that the interpreter makes of its own accord.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def old_objects_go_at_the_end() -> Iterator[None]:
    """So that the process ends like any other: a library that looks for what was never freed finds nothing."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def compiling_has_been_said() -> None:
    """The warning that compiled code calls no function hooks comes once per process, whichever test compiles first.

    It is tested in a process of its own (tests/sites/functions/test_operators.py).
    """
    from hookline.sites.functions import attach_function

    attach_function._State.warned = True


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> type[HookRegistry]:
    """A registry with nothing in it, without the entry points of this machine; the real one is back afterwards."""
    from hookline.lifecycle.registry import HookRegistry  # before it is emptied: built-in hooks are registered once

    for name in ("_hooks", "groups"):
        monkeypatch.setattr(HookRegistry, name, {})
    monkeypatch.setattr(HookRegistry, "_has_entry_points", True)
    return HookRegistry
