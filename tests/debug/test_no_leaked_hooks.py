"""The fixture ``no_leaked_hooks``: who it fails, whom it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from helpers_waiting import PATIENCE
from helpers_warm import run_warm

PLUGIN = "hookline.testing.pytest_plugin"

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


def test_a_test_that_leaves_hooks_fails_and_says_which(tmp_path: Path) -> None:
    """Of hookline, of torch, on a model, everywhere, on a function; a test that failed already has one error."""
    (tmp_path / "test_leaks.py").write_text(_TESTS)
    options = ["-p", PLUGIN, "-p", "no:cacheprovider", "-q", "-W", "ignore::hookline.errors.HookNeverFired"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = run_warm(
        [sys.executable, "-m", "pytest", *options, "test_leaks.py"],
        env={**own, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    text = done.stdout
    assert "1 failed, 8 passed, 5 errors" in text, text
    for name in ("ours", "torchs", "one_on_its_own_model", "one_everywhere", "a_function_hook"):
        assert f"ERROR at teardown of test_leaves_{name}" in text
    assert "1 hook is left: look (forward) on 0.0, from " in text
    assert "test_leaks.py:" in text
    assert "ERROR at teardown of test_fails_by_itself" not in text


def test_the_plugin_is_an_entry_point_that_imports_no_torch() -> None:
    """pytest loads it in every project where hookline is installed."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {PLUGIN: PLUGIN}
    code = f"import sys, {PLUGIN}; print('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.strip() == "False"
