"""The fixture ``no_leaked_hooks``: who it fails, whom it leaves alone."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers_waiting import PATIENCE

import hookline.testing.leaked_hooks  # noqa: F401  # pytester drops modules that its tests import first

pytest_plugins = ["pytester"]

_TESTS = """
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
import hookline as hl

SHARED = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
KEPT = []


def look(module, args, output):
    pass


SHARED[1].register_forward_hook(look)  # was there before: nobody's fault


def test_clean(no_leaked_hooks):
    with hl.attach(SHARED, "0", look):
        SHARED(torch.ones(1, 1))
    local = nn.Linear(1, 1)
    local.register_forward_hook(look)  # goes with its model
    KEPT.append(nn.Sequential(SHARED).register_forward_hook(look))  # likewise; SHARED was part of it


def test_puts_a_hooked_model_into_another(no_leaked_hooks):
    global WHOLE
    WHOLE = nn.Sequential(SHARED)


def test_leaves_ours(no_leaked_hooks):
    KEPT.append(hl.attach(SHARED, "0", look))


def test_leaves_torchs(no_leaked_hooks):
    KEPT.append(SHARED[0].register_forward_pre_hook(lambda module, args: None))


def test_leaves_one_on_its_own_model(no_leaked_hooks):
    model = no_leaked_hooks(nn.Linear(1, 1))
    model.register_forward_hook(look)


def test_leaves_one_everywhere(no_leaked_hooks):
    KEPT.append(register_module_forward_hook(look))


def test_leaves_a_function_hook(no_leaked_hooks):
    KEPT.append(hl.attach_function("*.relu", lambda fn, inputs, outputs: None))


def test_fails_by_itself(no_leaked_hooks):
    KEPT.append(hl.attach(SHARED, "1", look))
    raise RuntimeError("planted")


def test_does_not_ask():
    for handle in KEPT:
        handle.remove()
    SHARED[0].register_forward_hook(look)
"""


@pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")
def test_a_test_that_leaves_hooks_fails_and_says_which(pytester: pytest.Pytester) -> None:
    """Of hookline, of torch, on a model, everywhere, on a function; a test that failed already has one error."""
    pytester.makepyfile(_TESTS)
    result = pytester.runpytest_inprocess("-p", "hookline.testing.pytest_plugin", "-p", "no:cacheprovider", "-q")
    result.assert_outcomes(passed=8, failed=1, errors=5)
    text = result.stdout.str()
    for name in ("ours", "torchs", "one_on_its_own_model", "one_everywhere", "a_function_hook"):
        assert f"ERROR at teardown of test_leaves_{name}" in text
    assert "1 hook is left: look (forward) on 0.0, from " in text
    assert "_leaves_hooks_fails_and_says_which.py:" in text
    assert "ERROR at teardown of test_fails_by_itself" not in text


def test_the_plugin_is_an_entry_point_that_imports_no_torch() -> None:
    """pytest loads it in every project where hookline is installed."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    name = "hookline.testing.pytest_plugin"
    assert project["project"]["entry-points"]["pytest11"] == {name: name}
    code = f"import sys, {name}; print('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.strip() == "False"
