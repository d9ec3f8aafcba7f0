"""Plant each fault of `*.toml` in a copy of the package, and say whether the tests notice: `make mutants`.

A row survives if its tests pass with the fault in. Run by hand or at night, before and after a wing is rewritten: what
was noticed before must be noticed after. Give words to run only the rows whose names have them.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def planted(mutant: dict[str, str], package: Path) -> None:
    """Write the fault of ``mutant`` into its file below ``package``."""
    path = package / mutant["file"]
    text = path.read_text()
    if (found := text.count(mutant["old"])) != 1:
        raise SystemExit(f"{mutant['name']}: its text stands {found} times in {mutant['file']}; write the row anew.")
    path.write_text(text.replace(mutant["old"], mutant["new"]))


def killer(tests: list[str], source: Path) -> str | None:
    """Return the first test that fails with the package of ``source``; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--reruns", "0", "-m", "", *tests]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, text=True, check=False
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
    if done.returncode not in (0, 1, 2) or (done.returncode and not failed):
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return failed[0].split(" - ")[0] if failed else None


def main() -> None:
    """Run the rows whose names contain one of the words given, or all."""
    rows = [row for path in sorted(HERE.glob("*.toml")) for row in tomllib.loads(path.read_text())["mutant"]]
    rows = [row for row in rows if len(sys.argv) < 2 or any(word in row["name"] for word in sys.argv[1:])]
    survivors = 0
    for row in rows:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder)
            shutil.copytree(ROOT / "src/hookline", source / "hookline")
            planted(row, source / "hookline")
            found = killer(row["tests"], source)
        survivors += found is None
        print(f"{'killed  ' if found else 'SURVIVED'}  {row['name']}  {found or ''}", flush=True)
    print(f"{len(rows) - survivors} of {len(rows)} killed")
    sys.exit(1 if survivors else 0)


main()
