"""A process that ends with hooks on ends in silence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_SCENARIOS = Path(__file__).with_name("exit_scenarios.py")


def endings(*args: str) -> dict[str, tuple[int, str]]:
    """Run the scenarios; how each ended, and what it wrote to stderr."""
    done = subprocess.run([sys.executable, _SCENARIOS, *args], capture_output=True, text=True, timeout=600, check=True)
    return {name: (code, said) for name, (code, said) in json.loads(done.stdout).items()}


def test_a_process_that_ends_with_hooks_on_says_nothing() -> None:
    """Whatever is on, wherever the end comes from; an error in a hook is all that is said of it."""
    found = endings()
    code, said = found.pop("an error inside a hook")
    assert code == 1
    assert said.startswith("Traceback (most recent call last):")
    assert said.endswith("ZeroDivisionError: division by zero\n")
    assert said.count("Traceback") == 1
    assert len(found) == 4
    assert found == dict.fromkeys(found, (0, ""))


@pytest.mark.slow
@pytest.mark.full
def test_a_process_that_ends_with_compiled_hooks_on_says_nothing() -> None:
    """Also where hooks are part of compiled code, or came after it."""
    found = endings("compiled")
    assert len(found) == 2
    assert found == dict.fromkeys(found, (0, ""))
