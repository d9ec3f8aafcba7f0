"""Build hookline, install it into clean environments, and tell on which Python and torch it works.

    make release-check                                            # every Python and torch that this machine can have
    python release/matrix.py --python 3.11 /opt/python3.14 --torch 2.11 newest --extras none
    python release/matrix.py --python 3.11 --torch 2.13 --extras wandb serve

Every cell is an environment of its own: torch, then the wheel, then `smoke.py`, then the tests that hold hookline to
torch (`TESTS`). Each extra has a cell on the first Python and torch; one more cell installs from the sdist, and lets
mypy check `user_file.py` against it. A cell that cannot be had is listed with the reason. Where packages come from is
set by the variables of pip, or of uv where it is installed (PIP_INDEX_URL, UV_INDEX_URL).

Cells are kept in OUT/matrix.json, so that a later call adds to them; exit status 1 if one of this call failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from matrix_page import Cell, read_cells, table, write_cells, write_page

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TESTS = ("tests/contract", "tests/sites/test_torch_optimizers.py")
FOR_TESTS = (
    "pytest",
    "pytest-timeout",
    "pytest-rerunfailures",
    "hypothesis",
    "allpairspy",
    "transformers",
    "jsonschema",
)
FOR_DEVELOPERS = {"dev", "docs", "notebooks", "pictures"}
ENGINES = {"vllm": "an engine brings a torch of its own: `make test-vllm` tests it"}
"""Extras that have no cell, and why."""
STEP_SECONDS = 3600


class StepFailed(Exception):
    """Stop a cell; carries the state it is left in and the reason."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state = state


def main() -> int:
    """Run the cells that the command line asks for."""
    options = _parse()
    out = Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    wheel, sdist = build(out)
    cells = read_cells(out / "matrix.json")
    failed = False
    for wanted in _wanted(options, wheel, sdist):
        cell = run_cell(*wanted, out=out)
        print(f"{cell.name}: {cell.state} {cell.note}".rstrip(), flush=True)
        cells[cell.name] = cell
        failed |= cell.state == "failed"
        write_cells(out / "matrix.json", cells)
    print("\n" + table(cells))
    if options.page:
        write_page(Path(options.page), cells)
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="X.Y|PATH", help="interpreters")
    parser.add_argument(
        "--torch", nargs="+", metavar="X.Y", help="versions; newest: whatever pip takes. Default: all since the oldest"
    )
    parser.add_argument("--extras", nargs="+", default=["each"], metavar="EXTRA", help="each, none, or some")
    parser.add_argument("--out", default=ROOT / "build" / "release", help="where wheel, logs and matrix.json are")
    parser.add_argument("--page", help="write the table into this page, between its marks")
    return parser.parse_args()


def _wanted(options: argparse.Namespace, wheel: Path, sdist: Path) -> Iterator[tuple[str, str, str, Path]]:
    """Yield Python, torch, extra and what to install, of each cell."""
    versions = options.torch or torch_versions()
    for python in options.python:
        for torch in versions:
            yield python, torch, "", wheel
    python, torch = options.python[0], versions[0] if options.torch else versions[-1]
    extras = options.extras
    if extras == ["each"]:
        extras = sorted(set(PROJECT["optional-dependencies"]) - FOR_DEVELOPERS)
        yield python, torch, "", sdist
    for extra in extras:
        if extra != "none":
            yield python, torch, extra, wheel


def torch_versions() -> list[str]:
    """Return the minor versions that pip knows, from the oldest that hookline takes; else that one and ``newest``."""
    (oldest,) = (r.partition(">=")[2] for r in PROJECT["dependencies"] if r.startswith("torch>="))
    asked = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    said = subprocess.run(asked, capture_output=True, text=True).stdout
    found = {tuple(map(int, v)) for v in re.findall(r"\b(\d+)\.(\d+)\.\d+", said.partition("Available versions:")[2])}
    known = sorted(v for v in found if v >= tuple(map(int, oldest.split("."))))
    return [f"{major}.{minor}" for major, minor in known] or [oldest, "newest"]


def build(out: Path) -> tuple[Path, Path]:
    """Build wheel and sdist from the files of git, and check that the sdist makes the same wheel."""
    for old in [*out.glob("hookline-*.whl"), *out.glob("hookline-*.tar.gz")]:
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        log = out / "build.log"
        python = _venv(sys.executable, Path(folder) / "venv")
        _install(python, *SETTINGS["build-system"]["requires"], log=log)
        _call([python, "-m", "hatchling", "build", "-d", out], log, cwd=ROOT)
        (wheel,), (sdist,) = out.glob("hookline-*.whl"), out.glob("hookline-*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        source = Path(folder) / sdist.name.removesuffix(".tar.gz")
        _call([python, "-m", "hatchling", "build", "-t", "wheel", "-d", Path(folder) / "again"], log, cwd=source)
        (again,) = Path(folder, "again").glob("*.whl")
        if _contents(again) != _contents(wheel):
            raise SystemExit(f"the wheel that {sdist.name} makes has other files than {wheel.name}: see {out}")
    return wheel, sdist


def _contents(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {member.filename: member.CRC for member in archive.infolist()}


def run_cell(python: str, torch: str, extra: str, package: Path, *, out: Path) -> Cell:
    """Install ``package`` and check it in an environment that is removed afterwards; return what came of it."""
    cell = Cell(python, torch, extra, "sdist" if package.suffix == ".gz" else "wheel", "not possible", "")
    if extra in ENGINES:
        return cell.ended("not possible", ENGINES[extra])
    log = out / f"{cell.name.replace(' ', '_').replace('/', '_')}.log"
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="hookline-cell-") as folder:
        try:
            note = _run_steps(cell, package, Path(folder), log)
        except StepFailed as problem:
            return cell.ended(problem.state, str(problem))
    return cell.ended("tested", note)


def _run_steps(cell: Cell, package: Path, folder: Path, log: Path) -> str:
    interpreter = find_interpreter(cell.python)
    if interpreter is None:
        raise StepFailed("not possible", f"no interpreter {cell.python} on this machine")
    python = _venv(interpreter, folder / "venv")
    cell.python = _printed(python, "import platform; print(platform.python_version())")
    wish = "torch" if cell.torch == "newest" else f"torch=={cell.torch}" + ".*" * (cell.torch.count(".") == 1)
    _install(python, wish, log=log, state="not possible")
    cell.torch = _printed(python, "import torch; print(torch.__version__)")
    # Pinned, or what follows might bring another torch and the cell would be about that one. Without the build
    # (+cu130), which not every index has in the name of the file.
    said = _printed(python, "from importlib.metadata import version; print(version('torch'))")
    pin = "torch==" + said.partition("+")[0]
    _install(python, pin, f"{package}[{cell.extra}]" if cell.extra else str(package), log=log)
    _call([python, ROOT / "release" / "smoke.py", *([cell.extra] if cell.extra else [])], log, cwd=folder)
    if cell.package == "sdist":  # types from outside, once: a minute
        _install(python, pin, "mypy", log=log)
        shutil.copy(ROOT / "release" / "user_file.py", folder)
        _call([python, "-m", "mypy", "--strict", "user_file.py"], log, cwd=folder)
    if cell.extra or cell.package == "sdist":
        return ""
    _install(python, pin, *FOR_TESTS, log=log)
    quiet = {"PYTHONDONTWRITEBYTECODE": "1"}
    _call([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS], log, cwd=ROOT, **quiet)
    counts = re.findall(r"^\d+ passed.*(?= in )", log.read_text(), re.MULTILINE)
    return counts[-1]


def find_interpreter(python: str) -> str | None:
    """Return the path of ``python``, a path or a version: one on the PATH that runs, else one of pyenv."""
    if os.sep in python:
        return python if Path(python).exists() else None
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python{python}"))
    for found in (shutil.which(f"python{python}"), *map(str, reversed(of_pyenv))):
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    return None


def _venv(interpreter: str, folder: Path) -> Path:
    """Make an environment without pip, which some distributions leave out, and return its interpreter."""
    subprocess.run([interpreter, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def _install(python: Path, *wanted: str, log: Path, state: str = "failed") -> None:
    """Install with uv if it is there, which unpacks a CUDA build of torch once for all cells; else with pip."""
    uv = shutil.which("uv")
    tool = (
        [uv, "pip", "install"] if uv else [sys.executable, "-m", "pip", "--python", python, "install", "--no-compile"]
    )
    _call([*tool, "-q", *(["--python", python] if uv else []), *wanted], log, state=state)


def _printed(python: Path, program: str) -> str:
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, env=_environment())
    if done.returncode:
        raise StepFailed("failed", done.stderr.strip().splitlines()[-1])
    return done.stdout.strip()


def _environment(**more: str) -> dict[str, str]:
    """Return the environment without what would bring another Python's packages in."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | more


def _call(command: list[object], log: Path, *, cwd: Path | None = None, state: str = "failed", **more: str) -> None:
    """Run ``command``, add what it says to ``log``, and raise `StepFailed` with its last line of error."""
    shown = [str(part) for part in command]
    done = subprocess.run(
        shown,
        cwd=cwd,
        env=_environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_SECONDS,
    )
    with log.open("a") as file:
        file.write(f"$ {' '.join(shown)}\n{done.stdout}\n")
    if done.returncode:
        errors = re.findall(r"^(?:ERROR: .*|\w*Error.*|\d+ failed.*)", done.stdout, re.MULTILINE)
        what = errors[-1] if errors else (done.stdout.strip().splitlines() or ["nothing was printed"])[-1]
        raise StepFailed(state, f"{what} ({log.name})")


if __name__ == "__main__":
    sys.exit(main())
