"""What the pages and examples show is what happens."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hookline.testing.model_hooks import HOOK_CALLS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


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
                exec(compile(text, str(page), "exec"), namespace)
            printed = buffer.getvalue()
        elif language == "text" and printed is not None:
            assert printed == text
            printed = None


_FORKING = """
import os, runpy, sys, torch, torch._dynamo, hookline

for line in sys.stdin:
    path, folder = line.rstrip().split("\\t")
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(f"{folder}/out", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open(f"{folder}/err", os.O_WRONLY | os.O_CREAT), 2)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
sys.argv, sys.path[0] = [path], os.path.dirname(path)
runpy.run_path(path, run_name="__main__")
"""


@pytest.fixture(scope="module")
def forking() -> Iterator[subprocess.Popen[str]]:
    """A process that has loaded torch, which takes seconds, and forks one for each example that it is told."""
    environment = {**os.environ, "COLUMNS": "100"}
    command = [sys.executable, "-c", _FORKING]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_runs_and_says_something(example: Path, forking: subprocess.Popen[str], tmp_path: Path) -> None:
    """Each example ends well in a process of its own, prints something and warns of nothing."""
    assert forking.stdin is not None
    assert forking.stdout is not None
    forking.stdin.write(f"{example}\t{tmp_path}\n")
    forking.stdin.flush()
    code = forking.stdout.readline().strip()
    complaint = (tmp_path / "err").read_text()
    assert code == "0", complaint
    assert (tmp_path / "out").read_text().strip()
    assert "Warning" not in complaint


def test_an_example_that_fails_is_noticed(forking: subprocess.Popen[str], tmp_path: Path) -> None:
    """Control: the code with which a forked process ends is told, and so is what it said."""
    (tmp_path / "fails.py").write_text("raise SystemExit('of its own')")
    with pytest.raises(AssertionError, match="of its own"):
        test_an_example_runs_and_says_something(tmp_path / "fails.py", forking, tmp_path)
