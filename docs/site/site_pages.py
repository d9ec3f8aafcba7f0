"""Make the pages of the site that no file under docs/ holds, and let every link lead to a page of the site.

mkdocs calls `on_config`, `on_files` and `on_page_markdown` (mkdocs.yml, `hooks`). Pages that are made: the first
(README.md), the results of the benchmarks, the changelog, a page for each example, and the reference, from the stubs
that list the public names. `<!-- hookline COMMAND --help -->` on a page becomes what that command prints.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hookline"

COPIED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "results.md",
    "examples/README.md": "examples/index.md",
}
"""Pages that lie outside docs/, and where the site has them."""

FOLDERS_IN_NAV = ("recipes", "examples", "analyses", "reference")
"""Entries of `nav` that stand for all pages of a folder."""

HOW_TO = "How to"

FENCE = re.compile(r"^\s*(```|~~~)")
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
HELP = re.compile(r"^<!-- hookline (.*--help) -->$", re.MULTILINE)


# -- what mkdocs calls ----------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the folders of `nav`, and put pages that it does not name at the end of the how-tos."""
    config.nav = [_filled(entry) for entry in config.nav or []]
    named = str(config.nav)
    unnamed = [file.name for file in sorted((ROOT / "docs").glob("*.md")) if f"'{file.name}'" not in named]
    next(entry for entry in config.nav if HOW_TO in entry)[HOW_TO] += unnamed
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    for path, text in made_pages():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links out of docs/ lead to the site or to the repository; put in the help of commands where it is named."""
    source = next((old for old, new in COPIED.items() if new == page.file.src_uri), f"docs/{page.file.src_uri}")
    return "\n".join(_relinked(HELP.sub(_printed_help, markdown), source, page.file.src_uri))


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt: every page with its first sentence, for programs that read documentation."""
    Path(config.site_dir, "llms.txt").write_text(llms_text(), encoding="utf-8")


# -- pages ----------------------------------------------------------------------------------------------------------


def made_pages() -> Iterator[tuple[str, str]]:
    """Yield path and text of each page that has no file under docs/."""
    for source, path in COPIED.items():
        yield path, (ROOT / source).read_text(encoding="utf-8")
    for example in sorted((ROOT / "examples").glob("*.py")):
        code = example.read_text(encoding="utf-8")
        yield f"examples/{example.stem}.md", f"# {example.name}\n\n```python\n{code}```\n"
    yield from reference_pages()


def llms_text() -> str:
    """Return the list of all pages by folder, in the form of llmstxt.org; addresses lead from the root of the site."""
    pages = {path: (ROOT / "docs" / path).read_text(encoding="utf-8") for path in _written_pages()} | dict(made_pages())
    sections: dict[str, list[str]] = {}
    for path, text in sorted(pages.items()):
        folder = posixpath.dirname(path) or "pages"
        address = re.sub(r"(^|/)(index|README)\.md$", r"\1", path).removesuffix(".md")
        about = _first_sentence(text)
        sections.setdefault(folder, []).append(f"- [{_title(text)}](/{address}){f': {about}' if about else ''}")
    lines = ["# hookline", "", "> One hook system for PyTorch: hooks on any place of a model or any moment of its run."]
    for folder, rows in sorted(sections.items(), key=lambda item: (item[0] != "pages", item[0])):
        lines += ["", f"## {folder}", "", *rows]
    return "\n".join(lines) + "\n"


def _written_pages() -> list[str]:
    return [file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs").rglob("*.md")]


def _title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ").strip()


def _first_sentence(text: str) -> str:
    """Return the first sentence of prose, without links and marks; nothing if the page begins otherwise."""
    paragraph = next((part for part in text.split("\n\n")[1:] if re.match(r"[\w`*]", part)), "")
    plain = LINK.sub(lambda match: match[1].lstrip("!")[1:-2], " ".join(paragraph.split())).replace("**", "")
    return re.split(r"(?<=[.!?]) ", plain)[0]


def reference_pages() -> Iterator[tuple[str, str]]:
    """Yield a page for each public module; names that the top has too are shown there only."""
    top = {name for name, home in public_names("hookline") if home != "hookline"}
    for module in public_modules():
        lines = [f"# {module}", "", f"::: {module}"]
        lines += ["    options: {members: false, show_root_heading: false, show_root_toc_entry: false}", ""]
        own = [(name, home) for name, home in public_names(module) if home != module]
        if module != "hookline" and (shared := [name for name, _ in own if name in top]):
            links = (f"[`hl.{name}`](index.md#{name.lower()})" for name in shared)
            lines += [f"At the top too: {', '.join(links)}.", ""]
        for name, home in own:
            if module == "hookline" or name not in top:
                short = f"{module.replace('hookline', 'hl', 1)}.{name}"
                lines += [f'<a id="{name.lower()}"></a>', "", f"::: {home}.{name}"]
                lines += [f"    options: {{heading: {short}, toc_label: {name}}}", ""]
        yield reference_path(module), "\n".join(lines)


def reference_path(module: str) -> str:
    """Return where the site has the reference of `module`."""
    return "reference/index.md" if module == "hookline" else f"reference/{module.removeprefix('hookline.')}.md"


@cache
def public_modules() -> tuple[str, ...]:
    """Return the modules whose names are public: those with a stub, and the plain modules that the top names."""
    return ("hookline", *sorted(f"hookline.{name}" for name, home in public_names("hookline") if home == "hookline"))


@cache
def public_names(module: str) -> tuple[tuple[str, str], ...]:
    """Return the public names of `module` in order, each with the module that defines it."""
    folder = PACKAGE.joinpath(*module.split(".")[1:])
    stub = next((f for f in (folder / "__init__.pyi", folder.with_suffix(".py")) if f.is_file()), None)
    if stub is None:
        return ()
    text = stub.read_text(encoding="utf-8")
    imported = re.findall(r"^from (\S+) import (\w+) as \2$", text, re.MULTILINE)
    if not imported:  # a plain module: what it defines
        imported = [(module, name) for name in re.findall(r"^(?:class|def) ([A-Za-z]\w*)", text, re.MULTILINE)]
        return tuple((name, home) for home, name in imported)
    return tuple(sorted(((name, home) for home, name in imported), key=lambda pair: pair[0].lower()))


def _printed_help(mark: re.Match[str]) -> str:
    """Return what a command prints, as a block of code."""
    environment = {**os.environ, "COLUMNS": "110", "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-m", "hookline", *mark[1].split()]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return f"```text\n{printed}```"


# -- links ----------------------------------------------------------------------------------------------------------


@cache
def addresses() -> dict[str, str]:
    """Return the addresses in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(project["urls"])


def _relinked(markdown: str, source: str, site_path: str) -> Iterator[str]:
    """Yield the lines of a page with links as the site needs them; code is left as it is."""
    in_code = False
    for line in markdown.split("\n"):
        if FENCE.match(line):
            in_code = not in_code
        yield line if in_code else LINK.sub(lambda m: m[1] + site_link(m[2], source, site_path) + m[3], line)


def site_link(target: str, source: str, site_path: str) -> str:
    """Return `target`, as written in the file `source` of the project, as the page `site_path` has to write it."""
    path, mark, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return target
    wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if wanted.startswith("examples/") and wanted.endswith(".py"):
        page = wanted.removesuffix(".py") + ".md"
    elif wanted in COPIED:
        page = COPIED[wanted]
    elif wanted.startswith("docs/") and not wanted.endswith(".py"):
        page = wanted.removeprefix("docs/")
    elif source.startswith("docs/") and not (ROOT / wanted).exists():
        return target  # a page that is made (the reference), or a mistake, which mkdocs reports
    elif (ROOT / wanted).exists():
        return f"{addresses()['Homepage']}/blob/main/{wanted}{mark}{anchor}"
    else:
        raise PluginError(f"{source}: the link {target!r} leads nowhere")
    return os.path.relpath(page, posixpath.dirname(site_path) or ".") + mark + anchor


def _filled(entry: Any) -> Any:
    """Return an entry of `nav` with the pages of a folder in the place of its name."""
    if not isinstance(entry, dict):
        return entry
    ((title, inside),) = entry.items()
    if isinstance(inside, list):
        return {title: [_filled(one) for one in inside]}
    if inside not in FOLDERS_IN_NAV:
        return entry
    paths = [path for path, _ in made_pages() if path.startswith(f"{inside}/")]
    paths += [f"{inside}/{file.name}" for file in (ROOT / "docs" / inside).glob("*.md")]
    return {title: sorted(paths, key=lambda path: (not path.endswith(("index.md", "README.md")), path))}
