"""Spoil JSON values at random: other types, lost and foreign keys, deep nesting, odd numbers and odd texts."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

__all__ = ["as_bytes", "mutate", "mutate_text"]

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 0.5, 1e308, -0.0, "", " ", "*", "**", "h.#", "[", "]", "\\",
    "\x00", "\ud800", "é" * 50, "a" * 5000, "../../etc", "os:system", "__class__", [], {}, [[]], [None], {"": None},
    {"a": {"b": {"c": []}}}, ["*", 3], float("nan"), float("inf"),
]  # fmt: skip


PIECES = ["", "\t", ":", "- ", "{", "}", '"', "\n", "&a ", "*a", "%", "\x00", "é"]


def mutate(value: Any, rng: random.Random) -> Any:
    """Return ``value`` spoiled at one or two places."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 2)):
        value = _once(value, rng)
    return value


def _once(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        act = rng.random()
        if act < 0.6:
            value[key] = _once(value[key], rng)
        elif act < 0.75:
            del value[key]
        elif act < 0.9:
            value[rng.choice([key + "s", key[:-1], "extra", ""])] = copy.deepcopy(rng.choice(ODD))
        else:
            value[key] = _deep(value[key], rng.choice([2, 40]))
        return value
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        value[at] = _once(value[at], rng)
        return value * rng.choice([1, 1, 3])
    return copy.deepcopy(rng.choice(ODD))


def _deep(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value


def mutate_text(text: str, rng: random.Random) -> str:
    """Return ``text`` with some characters lost, doubled or exchanged."""
    letters = list(text)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(letters) + 1)
        letters[at : at + rng.randint(0, 3)] = rng.choice(PIECES)
    return "".join(letters)


def as_bytes(value: Any) -> bytes:
    """Return ``value`` as JSON, odd texts and odd numbers included."""
    return json.dumps(value, ensure_ascii=True).encode()
