"""Define what one request may ask of an engine beside its answer: hidden states, and hooks for itself alone.

The bodies of our server, ``vllm_xargs`` of vLLM and ``SglangHooks.ask`` are read into these classes. pydantic checks
them, and raises `OptionError` for what they cannot be. Imports no torch.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, StrictInt, StrictStr, TypeAdapter, model_validator
from pydantic.dataclasses import dataclass

from hookline.errors import HooklineError, OptionError
from hookline.messages import short_repr
from hookline.specs.hook_spec import HookSpec, option_errors

MOST_PATTERNS: Final = 256
"""Names and patterns of modules in one request: each is held against every module, 256 of them for 0.4 s in a model of
423."""
_LIMIT: Final = 1 << 31
_LONGEST_TEXT: Final = 4 << 20

CHECKED: Final = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
T = TypeVar("T")
_Class = TypeVar("_Class", bound=type)


def checked(kind: _Class) -> _Class:
    """Let a dataclass of pydantic raise `OptionError` where it is made in Python."""
    kind.__init__ = option_errors(kind)(kind.__init__)  # type: ignore[misc]
    return kind


def without_nulls(given: Any) -> Any:
    """Return an object without the keys that are null, which is the same as nothing."""
    if isinstance(given, Mapping):
        return {key: value for key, value in given.items() if value is not None}
    return given


def listed(given: Any) -> Any:
    """Return one text as a list of one."""
    return (given,) if isinstance(given, str) else given


_Text = Annotated[StrictStr, Field(min_length=1)]
_Patterns = Annotated[tuple[StrictStr, ...], Field(min_length=1, max_length=MOST_PATTERNS, fail_fast=True)]
_OneOrMany = BeforeValidator(listed, json_schema_input_type=StrictStr | _Patterns)
_Position = Annotated[StrictInt, Field(gt=-_LIMIT, lt=_LIMIT)]


@checked
@dataclass(frozen=True, config=CHECKED)
class StatesWanted:
    """The hidden states that a request asks for.

    Recipe::

        wanted = hookline.serve.StatesWanted(("model.layers.#",), positions="last")
        engine.submit(hookline.serve.GenerationRequest("r1", prompt_ids=(5, 6, 7), states=wanted), on_event=print)

    The token that is sampled last goes through no forward, so that an answer of n tokens has the states of n - 1.
    """

    layers: Annotated[_Patterns, _OneOrMany]
    """Names or globs of modules, of which each has to match: ``*`` crosses dots, ``#`` is one numeric part."""
    positions: Literal["all", "last"] = "all"
    """All tokens, or the last one of each forward: that of the prompt, then every token of the answer."""
    phase: Literal["prefill", "decode", "both"] = "both"
    """Of the forward over the prompt, of those over the answer, or of both."""
    of: Literal["output", "input"] = "output"
    """What the module returns, or what it is called with; the main tensor of it."""
    window: tuple[_Position, _Position | None] | None = None
    """First position and the one behind the last, in the sequence of prompt and answer from 0, such as ``[-8, null]``,
    instead of ``positions``; negative ones count from the end of the prompt."""

    _read = model_validator(mode="before")(without_nulls)

    def __post_init__(self) -> None:
        """Raise for options that do not go together."""
        if self.window is not None and self.positions != "all":
            raise OptionError("hidden_states takes positions or a window, not both.")

    def check(self, prompt: int) -> None:
        """Raise for a window that has no position, of a prompt with so many tokens."""
        if self.window is not None and self.window[1] is not None:
            first, end = (each + prompt if each < 0 else each for each in self.window if each is not None)
            if end <= max(first, 0):
                raise OptionError(f"window {list(self.window)} has no position in it, of {prompt} tokens of prompt.")

    def places(self, first: int, count: int, prompt: int) -> range:
        """Return the wanted positions among ``count`` from ``first`` on, rising, of a sequence with such a prompt."""
        end = first + count
        if self.phase == "prefill":
            end = min(end, prompt)
        elif self.phase == "decode":
            first = max(first, prompt)
        if self.positions == "last":  # of the prompt, then every token of the answer; a prompt may come in chunks
            first = max(first, prompt - 1)
        if self.window is not None:
            start, stop = self.window
            first = max(first, start if start >= 0 else prompt + start)
            end = end if stop is None else min(end, stop if stop >= 0 else prompt + stop)
        return range(first, max(end, first))


@checked
@dataclass(frozen=True, config=CHECKED)
class ClientHook(HookSpec):
    """A hook spec that a client sends: its errors end neither the engine nor a request."""

    target_modules: Annotated[_Patterns, _OneOrMany] = Field(default=...)
    """Names or globs of modules."""
    name: Annotated[StrictStr, Field(max_length=256)] = ""
    """For lists and metrics."""
    hook_factory: _Text = Field(default=...)
    """``package.module:factory``, one that the server's allow-list has."""
    enabled: Literal[True] = True
    """A hook that is sent is meant to be on."""
    on_error: Literal["disable", "warn"] = "disable"
    """What becomes of a hook that raises; a request never fails for it."""


@checked
@dataclass(frozen=True, config=CHECKED)
class RequestOptions:
    """What a request asks for.

    >>> RequestOptions.read('{"hidden_states": {"layers": ["model.norm"]}}').hidden_states.layers
    ('model.norm',)
    """

    hidden_states: StatesWanted | None = None
    """Send these hidden states back."""
    hooks: Annotated[tuple[ClientHook, ...], Field(max_length=64, fail_fast=True)] = ()
    """Hooks for this request alone: they see its rows, and change them alone."""

    _read = model_validator(mode="before")(without_nulls)

    def __post_init__(self) -> None:
        """Raise for more patterns than are matched in reasonable time."""
        layers = () if self.hidden_states is None else self.hidden_states.layers
        lists = [layers, *(each for hook in self.hooks for each in (hook.target_modules, hook.exclude))]
        if sum(map(len, lists)) > MOST_PATTERNS:
            raise OptionError(f"A request has at most {MOST_PATTERNS} names and patterns of modules; name fewer.")

    @classmethod
    def read(cls, given: Any) -> RequestOptions:
        """Return the options in an object or in its JSON; raise for what they cannot be."""
        with option_errors(cls):
            return TypeAdapter(cls).validate_python(split_key(given)[1])


def split_key(given: Any) -> tuple[str | None, dict[str, Any]]:
    """Return the ``key`` of options, an object or its JSON, as it is looked up; and the others, which are not checked.

    Whoever knows the key gets the results, so it has to be one that nobody guesses.
    """
    if isinstance(given, str):
        if len(given) > _LONGEST_TEXT:
            raise OptionError(f"The options of a request have at most {_LONGEST_TEXT} characters, got {len(given)}.")
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"The options of a request are JSON, got {given[:80]!r} ({error}).") from None
    if not isinstance(given, Mapping):
        raise OptionError(
            f"The options of a request are an object with hidden_states, hooks or key, got {short_repr(given)}."
        )
    rest = {name: value for name, value in given.items() if name != "key"}
    try:
        return (None if given.get("key") is None else str(uuid.UUID(given["key"]))), rest
    except (ValueError, AttributeError, TypeError):
        raise OptionError(
            f"key is a UUID such as {uuid.uuid4()}, made anew for each request; got {given['key']!r}."
        ) from None


def remembered(function: Callable[..., T]) -> Callable[..., T]:
    """Return `function` with its last results, and errors of ours, remembered.

    The answers to one prompt, which come one by one, have the same patterns.
    """

    @lru_cache(maxsize=32)
    def outcome(*args: Any) -> tuple[Any, HooklineError | None]:
        try:
            return function(*args), None
        except HooklineError as error:
            return None, error

    def call(*args: Any) -> T:
        found, error = outcome(*args)
        if error is not None:
            raise error.with_traceback(None)
        return found  # type: ignore[no-any-return]

    return call
