"""The documentation site builds without a network, and nothing on it is missing or comes from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import hookline
from hookline import errors

ROOT = Path(__file__).parents[1]
EXTERNAL = re.compile(r"""(?:<(?:script|img|iframe|source|video)\b[^>]*\ssrc|<link\b[^>]*\shref)=["']?(?:https?:)?//""")
FETCHED = re.compile(r"""url\(\s*["']?(?:https?:)?//""")


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_the_site_builds_without_a_network_and_is_whole(tmp_path: Path) -> None:
    """One test, since processes that share the tests would each build the site again: it takes ten seconds.

    Left out of the build are search and coloured code, which take a third of the time of `make site`.
    """
    environment = {**os.environ, "SITE_FULL": "false", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {str(page.relative_to(tmp_path)): page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")}
    check_that_every_page_is_there(pages)
    check_that_nothing_is_loaded_from_another_host(pages, [style.read_text() for style in tmp_path.rglob("*.css")])
    check_that_llms_text_names_every_page((tmp_path / "llms.txt").read_text(encoding="utf-8"), pages)
    check_that_the_reference_has_every_public_name(pages["reference/index.html"])


def check_that_every_page_is_there(pages: dict[str, str]) -> None:
    """Each Markdown file under docs/ has its page; so have README, changelog, results and examples."""
    for source in (ROOT / "docs").rglob("*.md"):
        path = source.relative_to(ROOT / "docs").with_suffix("")
        folder = path.parent if path.name in ("index", "README") else path
        assert str(folder / "index.html") in pages
    for made in ("changelog", "contributing", "results", "examples", *(f"examples/{e.stem}" for e in EXAMPLES)):
        assert f"{made}/index.html" in pages
    assert "--matmul-precision" in pages["command_line/index.html"]  # what `hookline run --help` prints
    for name, value in vars(errors).items():
        if isinstance(value, type) and not name.startswith("_"):
            assert f'<h2 id="{name.lower()}">{name}' in pages["errors/index.html"]


def check_that_nothing_is_loaded_from_another_host(pages: dict[str, str], styles: list[str]) -> None:
    """No script, style, font or picture has an address of its own."""
    for name, text in pages.items():
        assert not EXTERNAL.search(text), name
    assert styles
    for style in styles:
        assert not FETCHED.search(style)
    assert EXTERNAL.search('<script async src="https://cdn.example/x.js">')  # controls
    assert FETCHED.search("@font-face { src: url('//fonts.example/x.woff2') }")


def check_that_llms_text_names_every_page(text: str, pages: dict[str, str]) -> None:
    """Each address of the list is a page, and each page is in the list."""
    listed = {
        f"{address}/index.html".lstrip("/") for address in re.findall(r"^- \[.+?\]\(/(.*?)/?\)", text, re.MULTILINE)
    }
    assert listed == set(pages) - {"404.html"}


def check_that_the_reference_has_every_public_name(reference: str) -> None:
    """Each name at the top has an address, and a description made from its docstring."""
    for name in hookline.__all__:
        if name != "__version__":
            assert f'id="{name.lower()}"' in reference, name
    assert "Attach a hook to modules of a model." in reference
