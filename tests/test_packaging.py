"""What pyproject.toml promises: extras whose code is there, and a page that reads on the package index as here."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest

import hookline

ROOT = Path(__file__).parents[1]
SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = SETTINGS["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FOR_DEVELOPERS = {"dev", "docs", "notebooks", "pictures"}
FOR_USERS = sorted(set(EXTRAS) - FOR_DEVELOPERS - {"all"})
IMPORTED_AS = {"prometheus-client": "prometheus_client"}
# transformers imports it for chat templates, and does not install it.
IMPORTED_BY_OTHERS = {"jinja2"}
SOURCES = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))


WRITTEN = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
"""What the build adds to the files of the package."""


def name_of(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0]


def readme_on_the_index() -> str:
    """README.md as the build rewrites it."""
    text = (ROOT / "README.md").read_text()
    for rule in SETTINGS["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    return text


@pytest.mark.parametrize("extra", FOR_USERS)
def test_an_extra_brings_packages_that_the_library_imports(extra: str):
    """An extra is a promise: each of its packages is imported somewhere in the library."""
    for requirement in EXTRAS[extra]:
        package = IMPORTED_AS.get(name_of(requirement), name_of(requirement))
        if package not in IMPORTED_BY_OTHERS:
            assert re.search(rf'(import|from) {package}\b|"{package}[".]', SOURCES), package


def test_every_install_line_names_an_extra_that_there_is():
    """Of errors and of the README: ``pip install 'hookline[wandb]'`` has to work."""
    for text in (SOURCES, (ROOT / "README.md").read_text()):
        named = {extra for found in re.findall(r"hookline\[([a-z,]+)\]", text) for extra in found.split(",")}
        assert named <= set(EXTRAS)
        assert named or text is not SOURCES


def test_wheel_and_sdist_hold_what_users_need_and_nothing_else(tmp_path: Path):
    """Both are built here: every file of the package, its types, its metadata; the sdist has what builds it again."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", tmp_path], cwd=ROOT, check=True)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        (info,) = {name.partition("/")[0] for name in held if ".dist-info/" in name}
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        commands = archive.read(f"{info}/entry_points.txt").decode()
    package = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "hookline").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert "hookline/py.typed" in package
    assert held - package == {f"{info}/{name}" for name in WRITTEN}
    assert package <= held
    assert metadata["Version"] == PROJECT["version"] == hookline.__version__
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert set(metadata.get_all("Provides-Extra")) == set(EXTRAS)
    assert metadata.get_payload().strip() == readme_on_the_index().strip()
    assert "hookline = hookline.cli.main:main" in commands
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md", "release/smoke.py"} <= sources
    assert {f"src/{name}" for name in package} <= sources


def test_no_link_of_the_readme_is_relative_on_the_index():
    """Pages and pictures; there are some here, else this test would say nothing."""
    here = re.findall(r"\]\((?!https?://|#)([^)\s]+)\)", (ROOT / "README.md").read_text())
    assert any(link.endswith(".png") for link in here)
    assert any(link.endswith(".md") for link in here)
    text = readme_on_the_index()
    assert re.findall(r"\]\((?!https?://|#)([^)\s]+)\)", text) == []
    assert re.findall(r"!\[[^\]]*\]\((?!https://raw\.)[^)]*\)", text) == []
    for link in here:
        assert (ROOT / link.partition("#")[0]).exists(), link
