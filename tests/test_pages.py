"""What the pages and examples show is what happens."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def _blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of every code block, indentation taken off."""
    found = []
    for indent, language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        lines = [line.removeprefix(indent) for line in text.splitlines()]
        found.append((language, "\n".join(lines) + "\n"))
    return found


@pytest.mark.filterwarnings("ignore::hookline.HookNeverFired")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_in_order_and_print_what_they_show(page: Path) -> None:
    """Every python block runs, in one namespace per page; a text block after it is its exact output."""
    namespace: dict[str, object] = {"__name__": "__page__"}
    printed = None
    for language, text in _blocks(page):
        if language == "python":
            buffer = io.StringIO()
            with contextlib.redirect_stdout(buffer):
                exec(compile(text, str(page), "exec"), namespace)
            printed = buffer.getvalue()
        elif language == "text" and printed is not None:
            assert printed == text
            printed = None


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_runs_and_says_something(example: Path) -> None:
    """Each example ends well in a process of its own, prints something and warns of nothing."""
    environment = {**os.environ, "COLUMNS": "100"}
    run = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    assert "Warning" not in run.stderr
