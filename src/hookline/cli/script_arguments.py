"""Tell what a script was started with, in words that its run's folder and page have.

`script_session` calls it in the script's process, at the first step: it imports nothing that reads flags, which would
take 0.4 s of 0.84 s there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

__all__ = ["STRATEGY", "arguments_by_name"]

STRATEGY: Final = "script"
"""What the folder of a script's run is called, where that of an experiment has its strategy."""


def arguments_by_name(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a script by name, so that those of two runs can be compared.

    Recipe: ``arguments_by_name(["--lr", "1e-3", "--amp", "data.size=8"])`` is ``{"lr": 0.001, "amp": True,
    "data.size": 8}``.

    Nobody knows which words a flag takes: all up to the next flag are its value. Words before the first flag that name
    nothing are together the ``arguments``.
    """
    found: dict[str, list[str]] = {}
    current = "arguments"
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        if _is_flag(word):
            current = name
            found.setdefault(name, []).extend([value] if equals else [])
        elif equals and name.replace(".", "_").isidentifier():
            found.setdefault(name, []).append(value)
        else:
            found.setdefault(current, []).append(word)
    return {name: _number_or_text(" ".join(values)) if values else True for name, values in found.items()}


def _is_flag(word: str) -> bool:
    """Return whether a word is a flag, and no number below zero."""
    return word.startswith("-") and isinstance(_number_or_text(word), str) and word.strip("-") != ""


def _number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
