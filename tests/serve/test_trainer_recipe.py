"""The console part of the recipe "trainer against engine" runs as it stands on the page, as processes of a shell."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_serve import tiny_llama
from helpers_waiting import PATIENCE

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "trainer_against_engine.md"


def commands_of_page() -> tuple[dict[str, str], list[str]]:
    """Return the files that the page shows by ``cat``, and its other commands."""
    (block,) = re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    files, commands = {}, []
    for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        name = re.match(r"cat (\S+)\n", command)
        if name is None:
            commands.append(command)
        else:
            files[name[1]] = command[name.end() :]
    return files, commands


def run_in_shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run lines as a terminal does: with job control, and with the commands of this environment."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    known = {name: value for name, value in os.environ.items() if name != "HOOKLINE_SERVE_TOKEN"}
    return subprocess.run(
        ["bash", "-m", "-c", script], cwd=folder, env={**known, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=3 * PATIENCE, check=False,
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.timeout(4 * PATIENCE)
def test_the_lines_of_the_page_name_the_weight_that_the_engine_lacks(tmp_path: Path) -> None:
    """Both sides agree at first; then the trainer loads a folder in which one weight is another."""
    from safetensors.torch import load_file, save_file

    tiny_llama(tmp_path / "models" / "llama")
    files, commands = commands_of_page()
    assert list(files) == ["trace.json", "trainer.py"]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    port = free_port()  # another server may be at 8000
    lines = "".join(commands).replace(":8000", f":{port}").replace("hookline serve", f"hookline serve --port {port}")
    assert lines.count(str(port)) == 2
    done = run_in_shell(lines, tmp_path)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "hookline: stopped" in done.stderr
    assert (tmp_path / "page.html").stat().st_size > 1000

    weights = tmp_path / "models" / "llama" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.down_proj.weight"] += 0.1
    save_file(tensors, weights, {"format": "pt"})
    later = commands[commands.index("python trainer.py\n") :]
    parted = run_in_shell("rm -r trainer page.html\n" + "".join(later), tmp_path)
    assert parted.returncode == 1, (parted.stdout, parted.stderr)
    assert "model.layers.1.mlp.down_proj" in parted.stdout
