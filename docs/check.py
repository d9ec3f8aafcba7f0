"""Check that every relative link of the project's pages leads somewhere.

Takes `TOP_PAGES` and docs/**/*.md; prints one line, or lists the dead links and exits 1. Links with a scheme (https:,
mailto:) are left alone: a check that needs a network is not repeatable.

    python docs/check.py [ROOT]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

TOP_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")

FENCE = re.compile(r"^\s*(`{3,}|~{3,})")
CODE_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)(?:\s+#+)?\s*$")
LINK_TEXT = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
SCHEME = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*:|^//")
LINE_ANCHOR = re.compile(r"^L(\d+)(?:-L(\d+))?$")
HTML_ID = re.compile(r"""<[a-zA-Z][^>]*\s(?:id|name)=["']([^"']+)["']""")
# [a](target), [a]: target, and the two in HTML
INLINE = re.compile(r"\]\(\s*(?:<([^>]*)>|([^\s()]*(?:\([^\s()]*\)[^\s()]*)*))(?:\s+[\"'(][^)]*)?\)")
DEFINITION = re.compile(r"^ {0,3}\[(?!\^)[^\]]+\]:\s*(?:<([^>]*)>|(\S+))")
HTML = re.compile(r"""<(?:a|img)\s[^>]*(?:href|src)=["']([^"']*)["']""")
TARGETS = (INLINE, DEFINITION, HTML)


def main(root: Path) -> int:
    """Check the pages under `root` and return the exit status."""
    pages = [page for name in TOP_PAGES if (page := root / name).is_file()]
    pages += sorted((root / "docs").rglob("*.md"))
    num_links, problems = 0, []
    for page in pages:
        for line, target in links(page):
            num_links += 1
            if problem := fault(root, page, target):
                problems.append(f"{page.relative_to(root)}:{line}: {target!r}: {problem}")
    if problems:
        print(f"docs: {len(problems)} of {num_links} relative links lead nowhere")
        print("\n".join(problems))
        return 1
    print(f"docs: {num_links} relative links in {len(pages)} pages, all lead somewhere")
    return 0


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of `page` that stand outside fenced code."""
    fence = ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        mark = FENCE.match(line)
        if fence:
            # A block is closed by its own kind of mark, at least as long, with nothing after it.
            if mark and mark[1].startswith(fence) and line.strip() == mark[1]:
                fence = ""
        elif mark:
            fence = mark[1]
        else:
            yield number, line


def links(page: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, target) for every relative link of `page`."""
    for number, line in prose(page):
        bare = CODE_SPAN.sub("", line)
        for pattern in TARGETS:
            for match in pattern.finditer(bare):
                target = next((group for group in match.groups() if group), "")
                if not SCHEME.match(target):
                    yield number, target


def fault(root: Path, page: Path, target: str) -> str | None:
    """Say what is wrong with `target` as written on `page`, or None."""
    path, _, anchor = target.partition("#")
    path = unquote(path.partition("?")[0])
    if not path and not anchor:
        return "the link is empty"
    if not path:
        found = page
    else:
        found = (root / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve()
    if not found.is_relative_to(root):
        return "it points outside the project"
    if not found.exists():
        return "no such file"
    return fault_of_anchor(found, unquote(anchor)) if anchor else None


def fault_of_anchor(file: Path, anchor: str) -> str | None:
    """Say why `file` has no such anchor, or None: headings in Markdown, line numbers elsewhere."""
    if file.suffix == ".md":
        return None if anchor in anchors(file) else f"{file.name} has no such heading"
    lines = LINE_ANCHOR.match(anchor)
    if not lines or not file.is_file():
        return f"{file.name} has no such anchor"
    last = int(lines[2] or lines[1])
    num_lines = len(file.read_text(encoding="utf-8").splitlines())
    return None if last <= num_lines else f"{file.name} has only {num_lines} lines"


@cache
def anchors(page: Path) -> frozenset[str]:
    """Collect the anchors of a Markdown page: its headings as GitHub spells them, and ids set in HTML."""
    found: set[str] = set()
    for _, line in prose(page):
        found.update(HTML_ID.findall(CODE_SPAN.sub("", line)))
        if heading := HEADING.match(line):
            slug = base = slug_of(heading[1])
            repeat = 0
            while slug in found:
                repeat += 1
                slug = f"{base}-{repeat}"
            found.add(slug)
    return frozenset(found)


def slug_of(heading: str) -> str:
    """Spell a heading as its anchor: lower case, no punctuation, a hyphen for each space."""
    text = LINK_TEXT.sub(r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()))
