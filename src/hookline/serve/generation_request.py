"""Define requests to a served model, the events that answer them, and the counts of an engine.

The HTTP routes, tests and programs make requests, and `Engine` reads them. All values are checked here, except those
that only the model knows: its length, its vocabulary, the names of its layers.

>>> GenerationRequest("r1", prompt_ids=(5, 6), max_tokens=4).max_tokens
4
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from hookline.errors import OptionError
from hookline.messages import short_repr

if TYPE_CHECKING:
    from hookline.engines.hidden_states import StatesOfLayer, StatesWanted
    from hookline.factories.request_notes import RequestFlag

__all__ = ["EngineCount", "Event", "Finished", "GenerationRequest", "Token"]

_MOST_LOGPROBS: Final = 64
_LONGEST_SEED: Final = 64  # bits


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt, and how to continue it.

    Recipe::

        request = hookline.serve.GenerationRequest("r1", prompt_ids=(5, 6, 7), max_tokens=8, temperature=0.7, seed=1)
        engine.submit(request, on_event=print)
    """

    id: str
    """Its name; no two that wait or run at the same time have the same."""
    prompt_ids: tuple[int, ...]
    """The prompt in tokens, at least one."""
    max_tokens: int = 16
    """How many tokens the answer has at most; with 0 the prompt is run, for its hidden states, and nothing sampled."""
    temperature: float = 0.0
    """0 takes the likeliest token; else logits are divided by it, and a token is drawn."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability."""
    top_k: int = 0
    """Draw from so many of the likeliest tokens; 0 is all."""
    seed: int | None = None
    """For the draws of this request alone: its answer is the same whatever runs beside it. None is a random one."""
    stop: tuple[str, ...] = ()
    """Texts at which the answer ends; they are not part of it."""
    ignore_eos: bool = False
    """Go on after the model's end-of-text token."""
    logprobs: int | None = None
    """Also give the log probability of each token and of so many of the likeliest; None gives neither."""
    states: StatesWanted | None = None
    """Hidden states to give back when it has finished."""
    hooks: tuple[Mapping[str, Any], ...] = ()
    """Specs of hooks for this request alone: they see its rows, change them alone, and go when it has ended."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "prompt_ids", tuple(_whole("prompt_ids", each) for each in self.prompt_ids))
        put(self, "stop", _strings("stop", self.stop))
        put(self, "hooks", _specs(self.hooks))
        if not isinstance(self.id, str) or not self.id:
            raise OptionError(f"A request's id is a string that is not empty, got {self.id!r}.")
        if not self.prompt_ids:
            raise OptionError("A prompt has at least one token, and this one has none; begin it with the model's BOS.")
        if "" in self.stop:
            raise OptionError("stop holds texts at which to end, and an empty one is everywhere; leave it out.")
        _whole("max_tokens", self.max_tokens, 0)
        _whole("top_k", self.top_k, 0)
        _number("temperature", self.temperature, lambda value: value >= 0, "from 0 on")
        _number("top_p", self.top_p, lambda value: 0 < value <= 1, "above 0 and up to 1")
        if self.seed is not None and _whole("seed", self.seed).bit_length() > _LONGEST_SEED:
            raise OptionError(f"seed has at most {_LONGEST_SEED} bits, got {self.seed!r}.")
        if self.logprobs is not None and _whole("logprobs", self.logprobs, 0) > _MOST_LOGPROBS:
            raise OptionError(f"logprobs is at most {_MOST_LOGPROBS}, got {self.logprobs}.")


@dataclass(frozen=True, slots=True)
class Token:
    """One more token of an answer.

    Recipe::

        def on_event(event):
            if isinstance(event, hookline.serve.Token):
                print(event.text, end="")


        engine.submit(hookline.serve.GenerationRequest("r1", prompt_ids=(5, 6, 7)), on_event)
    """

    id: int
    """Its number in the vocabulary; the end-of-text token is reported too."""
    text: str = ""
    """What it adds to the answer; empty while a character, or what may become a stop text, is incomplete."""
    logprob: float | None = None
    """Natural logarithm of its probability as the model gave it, before temperature, if asked for."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their logarithms, the likeliest first, if asked for."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request.

    Recipe::

        def on_event(event):
            if isinstance(event, hookline.serve.Finished):
                for layer, found in (event.states or {}).items():
                    print(layer, found.positions, found.values.shape)


        wanted = hookline.serve.StatesWanted(("model.layers.#",))
        engine.submit(hookline.serve.GenerationRequest("r1", prompt_ids=(5, 6, 7), states=wanted), on_event)
    """

    reason: Literal["stop", "length", "cancelled", "error"]
    """An end-of-text token or a stop text; ``max_tokens``; a cancel, or an engine that closed; a failure."""
    states: dict[str, StatesOfLayer] | None = None
    """Hidden states by layer, if they were asked for and it ended well; of a layer that gave none, no rows."""
    prompt_tokens: int = 0
    """Tokens of the prompt."""
    completion_tokens: int = 0
    """Tokens of the answer, the end-of-text token included."""
    error: str | None = None
    """The failure, or the reason for a cancel."""
    stop: str | None = None
    """The stop text that was met."""
    hooks: tuple[dict[str, Any], ...] = ()
    """What the hooks of this request did, in their order: name, matched modules, rows, errors, metrics."""
    flags: tuple[RequestFlag, ...] = ()
    """What probes found in prompt and answer: one for each probe and module that found something."""


Event: TypeAlias = Token | Finished


class EngineCount(StrEnum):
    """A count of an engine; no member can be made without its help text.

    Recipe: ``engine.counts()[EngineCount.ANSWER_TOKENS]``, or by its name, ``engine.counts()["answer_tokens"]``.
    """

    help: str
    """What it counts, in a sentence for ``# HELP``."""
    grows: bool
    """Whether it only grows."""

    def __new__(cls, name: str, help: str, grows: bool) -> EngineCount:
        """Return the member of that name."""
        made = str.__new__(cls, name)
        made._value_ = name
        made.help = help
        made.grows = grows
        return made

    REQUESTS_ACCEPTED = "requests_accepted", "Sequences that were taken into the queue", True
    REQUESTS_REFUSED = "requests_refused", "Sequences that were refused with 429 because too many waited", True
    REQUESTS_STOP = "requests_stop", "Sequences that ended at an end-of-text token or a stop text", True
    REQUESTS_LENGTH = "requests_length", "Sequences that ended because they had max_tokens tokens", True
    REQUESTS_CANCELLED = "requests_cancelled", "Sequences that were cancelled, as by a client that went away", True
    REQUESTS_ERROR = "requests_error", "Sequences that ended with an error", True
    REQUESTS_WAITING = "requests_waiting", "Sequences that wait for their turn now", False
    REQUESTS_RUNNING = "requests_running", "Sequences in the running batch now", False
    PROMPT_TOKENS = "prompt_tokens", "Tokens of the prompts of requests that were run", True
    NOT_COMPUTED = (
        "not_computed",
        "Tokens of prompts that the engine took from its prefix cache, so that no hook saw them",
        True,
    )
    ANSWER_TOKENS = "answer_tokens", "Tokens that were sampled", True
    PREFILL_FORWARDS = "prefill_forwards", "Forwards of the model over prompts", True
    DECODE_FORWARDS = "decode_forwards", "Forwards of the model over one token of each answer", True
    FORWARD_SECONDS = "forward_seconds", "Seconds that the engine spent in forwards of the model", True
    CAPTURED_BYTES = "captured_bytes", "Bytes of hidden states that were gathered for requests", True
    CAPTURED_BYTES_RESERVED = (
        "captured_bytes_reserved",
        "Bytes of hidden states that running requests may still want",
        False,
    )
    CAPTURED_BYTES_LIMIT = "captured_bytes_limit", "The most bytes of hidden states that may be reserved", False
    HOOKS = "hooks", "Hooks that are attached now", False
    STEPS = "steps", "Steps of the engine, each a forward over one batch", True
    EAGER_STEPS = "eager_steps", "Steps that ran eagerly, so that hooks fired", True


# -- checks --------------------------------------------------------------------------------------------------


def _strings(name: str, value: Any) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(item, str) for item in given):
        raise OptionError(f"{name} is a list of strings, got {value!r}.")
    return tuple(given)


def _specs(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, Mapping) for item in value):
        raise OptionError(f"hooks is a list of hook specs, each a dictionary, got {short_repr(value)}.")
    return tuple(value)


def _whole(name: str, value: Any, least: int | None = None) -> int:
    if type(value) is not int or (least is not None and value < least):
        raise OptionError(
            f"{name} takes whole numbers{f' from {least} on' if least is not None else ''}, got {value!r}."
        )
    return value


def _number(name: str, value: Any, fits: Any, which: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not fits(value):
        raise OptionError(f"{name} is a number {which}, got {value!r}.")
