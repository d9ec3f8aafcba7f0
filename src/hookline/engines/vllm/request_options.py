"""Read what a request asks of hookline: ``SamplingParams(extra_args={"hookline": {…}})``, or ``vllm_xargs`` over HTTP.

`WorkerHooks` parses the options of each request when it begins. The values of ``hidden_states`` are those of
`StatesWanted`, and ``window``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from hookline.engines.vllm.step_rows import StepRow
from hookline.errors import OptionError
from hookline.messages import suggest
from hookline.serve.generation_request import StatesWanted

__all__ = ["RequestOptions", "StatesPlan", "request_options"]

_KEYS: Final = ("hidden_states", "hooks", "key", "answers")


@dataclass(frozen=True)
class StatesPlan:
    """Which hidden states a request wants, and of which of its tokens."""

    wanted: StatesWanted
    window: tuple[int, int | None] | None = None
    """First position, and the one behind the last; negative ones count from the end of the prompt."""

    @classmethod
    def read(cls, given: Any) -> StatesPlan:
        """Return the plan that a request describes; raise for what no plan can be."""
        if not isinstance(given, Mapping):
            raise OptionError(f"hidden_states is an object such as {{'layers': ['model.layers.#']}}, got {given!r}.")
        known = [each.name for each in fields(StatesWanted)] + ["window"]
        for key in given:
            if key not in known:
                raise OptionError(f"hidden_states has no option {key!r}{suggest(str(key), known) or '.'}")
        if given.get("layers") is None:
            raise OptionError("hidden_states needs layers: names or patterns of modules, such as 'model.layers.#'.")
        rest = {key: value for key, value in given.items() if key != "window" and value is not None}
        window = _window(given.get("window"))
        if window is not None and rest.get("positions", "all") != "all":
            raise OptionError("hidden_states takes positions or a window, not both.")
        return cls(StatesWanted(**rest), window)

    def check(self, prompt: int) -> None:
        """Raise for a window that ends before it starts, in a sequence whose prompt has so many tokens."""
        if self.window is None or self.window[1] is None:
            return
        first, end = (each + prompt if each < 0 else each for each in self.window if each is not None)
        if end <= max(first, 0):
            raise OptionError(
                f"window {list(self.window)} has no position in it: of {prompt} tokens of prompt it begins at {first} "
                f"and ends before {end}."
            )

    def positions(self, row: StepRow) -> Sequence[int]:
        """Return the positions of a row's tokens that are wanted, rising."""
        first, end = row.first, row.first + row.count
        wanted = self.wanted
        if wanted.phase == "prefill":
            end = min(end, row.prompt)
        elif wanted.phase == "decode":
            first = max(first, row.prompt)
        if wanted.positions == "last":  # of the prompt, then every token of the answer; a prompt may come in chunks
            first = max(first, row.prompt - 1)
        if self.window is not None:
            start, stop = self.window
            first = max(first, start if start >= 0 else row.prompt + start)
            end = end if stop is None else min(end, stop if stop >= 0 else row.prompt + stop)
        if isinstance(wanted.positions, str):
            return range(first, max(end, first))
        listed = {each if each >= 0 else row.prompt + each for each in wanted.positions}
        return [position for position in range(first, end) if position in listed]


@dataclass(frozen=True)
class RequestOptions:
    """What a request asks for."""

    key: str | None = None
    """Under which its results are kept, and by which hooks for single requests know it; its id if left out."""
    states: StatesPlan | None = None
    hooks: tuple[Mapping[str, Any], ...] = ()
    """Specs of hooks for this request alone."""
    answers: int = 1
    """How many answers, each a request of its own here, the client asked for together."""


def request_options(given: Any) -> RequestOptions:
    """Return the options of a request, an object or its JSON; raise for what they cannot be.

    >>> request_options('{"key": "mine"}').key
    'mine'
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise OptionError(f"The options of a request are JSON, got {given[:80]!r} ({error}).") from None
    if not isinstance(given, Mapping):
        raise OptionError(f"The options of a request are an object with {', '.join(_KEYS)}, got {given!r}.")
    for key in given:
        if key not in _KEYS:
            raise OptionError(
                f"A request has no option {key!r}{suggest(str(key), _KEYS) or '.'} It takes {', '.join(_KEYS)}."
            )
    key = given.get("key")
    if key is not None and (not isinstance(key, str) or not key):
        raise OptionError(f"key is a text that is not empty, got {key!r}.")
    states, answers = given.get("hidden_states"), given.get("answers", 1)
    if type(answers) is not int or answers < 1:
        raise OptionError(f"answers is a whole number from 1 on, got {answers!r}.")
    plan = None if states is None else StatesPlan.read(states)
    return RequestOptions(key, plan, _hooks(given.get("hooks")), answers)


def _hooks(given: Any) -> tuple[Mapping[str, Any], ...]:
    if given is None:
        return ()
    if not isinstance(given, list | tuple) or not all(isinstance(each, Mapping) for each in given):
        raise OptionError(f"hooks is a list of hook specs, got {given!r}.")
    return tuple(given)


def _window(given: Any) -> tuple[int, int | None] | None:
    if given is None:
        return None
    fits = isinstance(given, list | tuple) and len(given) == 2 and type(given[0]) is int
    if not fits or not (given[1] is None or type(given[1]) is int):
        raise OptionError(f"window is [first, behind the last], such as [0, 16] or [-8, null], got {given!r}.")
    first, end = given
    if end is not None and (first < 0) == (end < 0) and end <= first:
        raise OptionError(f"window is [first, behind the last], and {given!r} ends before it starts.")
    return int(first), end
