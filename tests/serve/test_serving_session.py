"""The commands of docs/serving.md, in their order, as printed: a real server, a real shell, the printed answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers_http import ServerProcess
from helpers_waiting import PATIENCE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "serving.md"
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
CHANGING = {
    r"(?<=cmpl-)[0-9a-f]{32}": "[0-9a-f]{32}",
    r"(?<=gen-)[0-9a-f]{32}": "[0-9a-f]{32}",
    r'(?<="created":)\d+': r"\d+",
    r'(?<="cost_us":)\d+\.\d+': r"\d+\.\d+",
    r'(?<="text":)"[^"]*"': r'"[^"]*"',  # which token is the likeliest of a random model depends on the processor
    r'(?<="data":)"[^"]*"': '"[^"]*"',
    r'(?<="token_ids":)\[[\d,]*\]': r"\[[\d,]*\]",
    "…": ".*",
}
"""What is another at each run, and what is left out, by how it is printed; and what may stand in its place."""


@dataclass
class Command:
    """A command of the page, and what the page says it prints."""

    text: str
    printed: str


def commands_of_page() -> list[Command]:
    """Every command after the start of the server."""
    found = []
    for block in CONSOLE.findall(PAGE.read_text(encoding="utf-8")):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            last = next(place for place, line in enumerate(lines) if is_end_of_command(lines[: place + 1]))
            found.append(Command("\n".join(lines[: last + 1]), "\n".join(lines[last + 1 :])))
    return found


def is_end_of_command(lines: list[str]) -> bool:
    """Whether a shell would run these lines: no quote is open, and no backslash ends the last one."""
    text = "\n".join(lines)
    checked = subprocess.run(["bash", "-n", "-c", text], capture_output=True, check=False)
    return checked.returncode == 0 and not checked.stderr and not text.endswith("\\")


def pattern_of(printed: str) -> re.Pattern[str]:
    """What the output has to match; spaces and line breaks do not count, as the page breaks long lines."""
    text = re.sub(r"\s+", "", printed)
    masks = re.compile("|".join(CHANGING))
    pieces, end = [], 0
    for mask in masks.finditer(text):
        allowed = next(value for key, value in CHANGING.items() if re.compile(key).match(text, mask.start()))
        pieces += [re.escape(text[end : mask.start()]), allowed]
        end = mask.end()
    return re.compile("".join([*pieces, re.escape(text[end:])]), re.DOTALL)


def matches(printed: str, output: str) -> bool:
    return bool(pattern_of(printed).fullmatch(re.sub(r"\s+", "", output)))


def test_a_printed_answer_matches_itself_and_no_other() -> None:
    """The control of the test below."""
    printed = '{"id":"cmpl-2512add9923a4b119b544fb5f20d53b4", … ,"fired":36,\n "cost_us":10.5}'
    assert matches(printed, '{"id":"cmpl-ffffadd9923a4b119b544fb5f20d53b4","x":1,"fired":36,"cost_us":99.25}')
    assert not matches(printed, '{"id":"cmpl-ffffadd9923a4b119b544fb5f20d53b4","x":1,"fired":35,"cost_us":99.25}')


@pytest.mark.slow
def test_the_session_runs_as_printed(tmp_path: Path) -> None:
    """Each `curl`, and what reads the exported files."""
    commands = commands_of_page()
    shown = next(each for each in commands if each.text == "cat hooks.json")
    (tmp_path / "hooks.json").write_text(shown.printed, encoding="utf-8")
    (tmp_path / "token").write_text("s3cret\n", encoding="utf-8")
    model = tmp_path / "models" / "tiny"
    subprocess.run([sys.executable, ROOT / "examples" / "serving.py", model], check=True, timeout=PATIENCE)
    options = ["--model", str(model), "--hooks", str(tmp_path / "hooks.json"), "--token-file", str(tmp_path / "token")]
    asked = [each for each in commands if each.text.startswith(("curl", "python -c"))]
    assert len(asked) >= 10
    with ServerProcess(*options, "--export-dir", str(tmp_path / "exports")) as server:
        address = server.url().removeprefix("http://")
        for command in asked:
            output = run(command.text, address, tmp_path)
            deadline = time.monotonic() + PATIENCE
            while "/metrics" in command.text and not matches(command.printed, output) and time.monotonic() < deadline:
                output = run(command.text, address, tmp_path)  # an export writes in a thread of its own
            assert matches(command.printed, output), f"{command.text}\nprinted:\n{command.printed}\nis:\n{output}"


def run(command: str, address: str, folder: Path) -> str:
    """What a shell prints for a command of the page."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command.replace("localhost:8000", address)],
        cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=PATIENCE, check=True,
    )  # fmt: skip
    return done.stdout
