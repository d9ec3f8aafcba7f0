"""What the pages and examples show is what happens."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import sys
from pathlib import Path

import pytest
from helpers_warm import run_warm

from hookline.testing.model_hooks import HOOK_CALLS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each page and example in an empty folder: some write into the current one."""
    monkeypatch.chdir(tmp_path)


def _blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of every code block, indentation taken off."""
    found = []
    for indent, language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        lines = [line.removeprefix(indent) for line in text.splitlines()]
        found.append((language, "\n".join(lines) + "\n"))
    return found


@pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run_in_order_and_print_what_they_show(page: Path) -> None:
    """Every python block runs, in one namespace per page; a text block after it is its exact output."""
    namespace: dict[str, object] = {"__name__": "__page__"}
    HOOK_CALLS.clear()  # of other tests in this process
    printed = None
    for language, text in _blocks(page):
        if language == "python":
            buffer = io.StringIO()
            with contextlib.redirect_stdout(buffer):
                exec(compile(text, str(page.relative_to(ROOT)), "exec"), namespace)
            printed = buffer.getvalue()
        elif language == "text" and printed is not None:
            assert printed == text
            printed = None
    HOOK_CALLS.clear()  # they hold the namespace; a watch in it looks at every optimizer while it lives
    namespace.clear()
    gc.collect()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_runs_and_says_something(example: Path) -> None:
    """Each example ends well in a process of its own, prints something and warns of nothing."""
    done = run_warm([sys.executable, example], capture_output=True, text=True, env={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Warning" not in done.stderr


def test_an_example_that_fails_is_noticed(tmp_path: Path) -> None:
    """Control: the code with which a forked process ends is told, and so is what it said."""
    (tmp_path / "fails.py").write_text("raise SystemExit('of its own')")
    with pytest.raises(AssertionError, match="of its own"):
        test_an_example_runs_and_says_something(tmp_path / "fails.py")
