"""Check the hookline that is installed beside this interpreter, as somebody who has just installed it.

`matrix.py` runs it in every clean environment; it imports nothing of the repository.

    python smoke.py [EXTRA]

Without an extra: every public name, the help, a short run. With one: its packages are there and import, and what needs
them works. Exit status 1 and a traceback if anything does not.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SHORT_RUN = ("run", "mod_arithmetic", "--epochs", "1", "--console", "none", "--hooks", "norms", "--hook-jsonl")

COMMANDS: dict[str, tuple[str, ...]] = {
    "wandb": (*SHORT_RUN, "--hook-wandb", "smoke"),
    "tensorboard": (*SHORT_RUN, "--hook-tensorboard"),
    "mlflow": (*SHORT_RUN, "--hook-mlflow"),
    "parquet": (*SHORT_RUN, "--hook-parquet"),
    "prometheus": (*SHORT_RUN, "--hook-prometheus", "0"),
    "all": (*SHORT_RUN, "--hook-parquet", "--hook-tensorboard"),
}
"""A command that needs the extra."""

MODULES: dict[str, tuple[str, ...]] = {
    "serve": ("hookline.serve.http.app",),
    "transformers": ("hookline.integrations.transformers",),
    "accelerate": ("hookline.integrations.accelerate",),
    "lightning": ("hookline.integrations.lightning", "hookline.integrations.fabric"),
    "all": ("hookline.serve.http.app", "hookline.integrations.transformers", "hookline.integrations.lightning"),
}
"""Modules that import the packages of the extra."""


def main(extra: str | None) -> None:
    """Check the bare installation, or what ``extra`` adds to it."""
    import hookline

    home = Path(hookline.__file__).resolve()
    assert home.is_relative_to(Path(sys.prefix).resolve()), f"{home} is not in {sys.prefix}"
    assert (home.parent / "py.typed").is_file()
    assert hookline.__version__ == importlib.metadata.version("hookline")
    if extra is None:
        print(f"{_import_public_names()} public names")
        assert "usage: hookline" in _run("--help")
        assert hookline.__version__ in _run("--version")
        _check_short_run()
    else:
        _check_extra(extra)


def _import_public_names() -> int:
    """Import every name that a public package lists, and count them; one that needs an extra says which."""
    import hookline
    from hookline.errors import MissingPackageError

    packages = [hookline]
    packages += [
        importlib.import_module(found.name)
        for found in pkgutil.iter_modules(hookline.__path__, "hookline.")
        if found.ispkg and not found.name.rpartition(".")[2].startswith("_")
    ]
    count = 0
    for package in packages:
        for name in getattr(package, "__all__", ()):
            try:
                getattr(package, name)
            except MissingPackageError as missing:
                if "pip install 'hookline[" not in str(missing):
                    raise
            count += 1
    assert count > len(hookline.__all__) >= 50
    return count


def _check_short_run() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _run(*SHORT_RUN, "--output-dir", folder)
        logs = list(Path(folder).rglob("*.jsonl"))
        records = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
        assert any("norms" in str(record) for record in records), records
        assert [page for page in Path(folder).rglob("report.html") if page.stat().st_size > 10_000]


def _check_extra(extra: str) -> None:
    for requirement in importlib.metadata.requires("hookline") or ():
        if re.search(rf"""extra == ['"]{extra}['"]""", requirement):
            name = re.match(r"[\w.-]+", requirement)[0]  # type: ignore[index]
            print(name, importlib.metadata.version(name))
    for module in MODULES.get(extra, ()):
        importlib.import_module(module)
    if extra in COMMANDS:
        with tempfile.TemporaryDirectory() as folder:
            _run(*COMMANDS[extra], "--output-dir", folder)
    assert extra in MODULES or extra in COMMANDS, f"no check of {extra!r}: add it to COMMANDS or MODULES of {__file__}"


def _run(*arguments: str) -> str:
    environment = {**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "hookline", *arguments], cwd=folder, env=environment, capture_output=True, text=True
        )
    assert done.returncode == 0, f"hookline {' '.join(arguments)}\n{done.stdout}{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
