"""Turn the one piece of reStructuredText in our docstrings, `Recipe::`, into Markdown.

mkdocstrings loads it (mkdocs.yml, `extensions`).
"""

from __future__ import annotations

import re
from typing import Any

import griffe

RECIPE = re.compile(r"(\w)::\n\n((?:    .*\n|\n)+)", re.MULTILINE)


class DocstringMarkdown(griffe.Extension):
    """Rewrite every docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Let the code under `Recipe::` be shown as Python."""
        if obj.docstring:
            obj.docstring.value = RECIPE.sub(_fenced, obj.docstring.value + "\n").rstrip("\n")


def _fenced(match: re.Match[str]) -> str:
    code = "\n".join(line.removeprefix("    ") for line in match[2].strip("\n").splitlines())
    return f"{match[1]}:\n\n```python\n{code}\n```\n\n"
