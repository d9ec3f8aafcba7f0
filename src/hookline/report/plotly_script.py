"""Return the script that draws the plots: plotly's own, without the modules that the page does not use.

`report_page` puts it into the page. The bundle is one function that holds some 1,200 modules,
``var name = W((exports, module) => {…})``, each run when it is first called by its name. Lines and heat maps need a
quarter of them: 1.2 MB instead of 4.8. With the whole bundle a small page has 2.07 MB instead of 0.65, and Chromium
draws it in 7.5 s instead of 3.3 (medians of nine on two busy cores), so the bundle is trimmed.
"""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Collection, Iterable
from functools import cache
from typing import Final

from hookline.errors import MissingPackageError

__all__ = ["packed_plotly", "trim"]

_TRIED: Final = ("4.1.1",)
"""Versions of plotly.js whose trimmed bundle was tried; others are used whole, which is only slower."""
_USED: Final = ("bar", "heatmap")
"""Kinds of plots beside lines, which are part of its core."""

_VERSION: Final = re.compile(r"plotly\.js v([\d.]+)")
_LAST: Final = re.compile(
    r"var (?P<last>[\w$]+)=(?P<wrap>[\w$]+)\(\([\w$]+,(?P<module>[\w$]+)\)=>\{"
    r"var (?P<core>[\w$]+)=(?P<start>[\w$]+)\(\);(?P=core)\.register\(\[(?P<kinds>[\w$(),]+)\]\);"
    r"(?P=module)\.exports=(?P=core)\}\);return (?P=last)\(\);"
)
"""The last module: takes the core, registers all kinds of plots, gives the core back."""
_EXPORTS: Final = re.compile(r"\.exports=([\w$]+)\(\)")
_NAME: Final = re.compile(r'moduleType:"trace",name:"(\w+)"')
_WORD: Final = re.compile(r"(?<![\w$.])[\w$]+(?![\w$:])")


@cache
def packed_plotly() -> str:
    """Return JavaScript that sets ``window.Plotly``, compressed (0.5 MB), in base64."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingPackageError(
            "The page of a run is drawn by plotly, which comes with hookline and is not here. Next: pip install plotly."
        ) from error
    text: str = get_plotlyjs()
    version = _VERSION.search(text[:500])
    script = trim(text) if version and version[1] in _TRIED else text
    return base64.b64encode(gzip.compress(script.encode(), 9, mtime=0)).decode()


def trim(text: str) -> str:
    """Return the bundle with only the modules that the core and the kinds in use call, directly or not.

    Recipe: ``trim(plotly.offline.get_plotlyjs())``. A bundle that is made differently is returned as it is.
    """
    last = _LAST.search(text)
    if last is None:
        return text
    first, modules = _modules(text, last)
    used = [kind for kind in last["kinds"].replace("()", "").split(",") if _kind(kind, modules) in _USED]
    if len(used) != len(_USED) or last["start"] not in modules:
        return text
    kept = _needed([last["start"], *used], modules)
    end = last.start()
    body = "".join(module for name, module in modules.items() if name in kept)
    registered = ",".join(f"{kind}()" for kind in used)
    return text[:first] + body + text[end : last.start("kinds")] + registered + text[last.end("kinds") :]


def _modules(text: str, last: re.Match[str]) -> tuple[int, dict[str, str]]:
    """Return where the first module begins, and the text of each by its name, without the last one."""
    begin = re.compile(rf"(?<![\w$.])var ([\w$]+)={re.escape(last['wrap'])}\((?:\(|[\w$]+=>)")
    found = [(match.start(), match[1]) for match in begin.finditer(text, 0, last.end()) if match[1] != last["last"]]
    ends = [start for start, _ in found[1:]] + [last.start()]
    modules = {name: text[start:end] for (start, name), end in zip(found, ends, strict=True)}
    return found[0][0] if found else 0, modules


def _kind(name: str, modules: dict[str, str]) -> str | None:
    """Return the kind of plot that a module registers: it exports another module, which names it."""
    handed = _EXPORTS.search(modules.get(name, ""))
    told = _NAME.search(modules.get(handed[1], "")) if handed else None
    return told[1] if told else None


def _needed(roots: Iterable[str], modules: dict[str, str]) -> Collection[str]:
    """Return the modules that ``roots`` name, directly or not; a word that only looks like a name does no harm."""
    kept: set[str] = set()
    todo = list(roots)
    while todo:
        name = todo.pop()
        if name not in kept:
            kept.add(name)
            todo += [word for word in set(_WORD.findall(modules[name])) if word in modules]
    return kept
