"""Define requests to a served model, and the events that answer them.

The HTTP routes, tests and programs make requests, and `Engine` reads them. pydantic checks all values, except those
that only the model knows: its length, its vocabulary, the names of its layers.

>>> GenerationRequest("r1", prompt_ids=(5, 6), max_tokens=4).max_tokens
4
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, StrictStr
from pydantic.dataclasses import dataclass

from hookline.engines.request_options import CHECKED, ClientHook, StatesWanted, checked, listed

if TYPE_CHECKING:
    from hookline.engines.hidden_states import StatesOfLayer
    from hookline.factories.request_notes import RequestFlag

Reason: TypeAlias = Literal["stop", "length", "cancelled", "error"]

_LIMIT: Final = 1 << 31
_INT64: Final = 1 << 63

Length: TypeAlias = Annotated[StrictInt, Field(ge=0, lt=_LIMIT)]
Temperature: TypeAlias = Annotated[StrictFloat, Field(ge=0, le=100)]
_Stop = Annotated[StrictStr, Field(min_length=1, max_length=1000)]
_Stops = Annotated[tuple[_Stop, ...], Field(max_length=16, fail_fast=True)]


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Sampling:
    """How to choose the tokens of an answer; of a request to the engine, and of the bodies of HTTP."""

    temperature: Temperature = 0.0
    """0 takes the likeliest token; else logits are divided by it, and a token is drawn."""
    top_p: Annotated[StrictFloat, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that together have this probability."""
    top_k: Length = 0
    """Draw from so many of the likeliest tokens; 0 is all. (Not of OpenAI.)"""
    seed: Annotated[StrictInt, Field(ge=-_INT64, lt=_INT64)] | None = None
    """For the draws of this request alone: its answer is the same whatever runs beside it. None is a random one."""
    stop: Annotated[_Stops, BeforeValidator(listed, json_schema_input_type=_Stop | _Stops)] = ()
    """Texts at which the answer ends; they are not part of it."""
    ignore_eos: StrictBool = False
    """Go on after the model's end-of-text token. (Not of OpenAI.)"""


@checked
@dataclass(frozen=True, config=CHECKED)
class GenerationRequest(Sampling):
    """One prompt, and how to continue it.

    Recipe::

        request = hookline.serve.GenerationRequest("r1", prompt_ids=(5, 6, 7), max_tokens=8, temperature=0.7, seed=1)
        engine.submit(request, on_event=print)
    """

    id: Annotated[StrictStr, Field(min_length=1)]
    """Its name; no two that wait or run at the same time have the same."""
    prompt_ids: Annotated[tuple[StrictInt, ...], Field(min_length=1, fail_fast=True)]
    """The prompt in tokens, at least one."""
    max_tokens: Length = 16
    """How many tokens the answer has at most; with 0 the prompt is run, for its hidden states, and nothing sampled."""
    _: dataclasses.KW_ONLY
    logprobs: Annotated[StrictInt, Field(ge=0, le=64)] | None = None
    """Also give the log probability of each token and of so many of the likeliest; None gives neither."""
    states: StatesWanted | None = None
    """Hidden states to give back when it has finished."""
    hooks: tuple[ClientHook, ...] = ()
    """Specs of hooks for this request alone: they see its rows, change them alone, and go when it has ended."""


@dataclasses.dataclass(frozen=True, slots=True)
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


@dataclasses.dataclass(frozen=True, slots=True)
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

    reason: Reason
    """An end-of-text token or a stop text; ``max_tokens``; a cancel, or an engine that closed; a failure."""
    states: dict[str, StatesOfLayer] | None = None
    """Hidden states by layer, if they were asked for and it ended well; of a layer that gave none, no rows."""
    prompt_tokens: int = 0
    """Tokens of the prompt."""
    completion_tokens: int = 0
    """Tokens of the answer, the end-of-text token included."""
    error: str | None = None
    """The failure."""
    hooks: tuple[dict[str, Any], ...] = ()
    """What the hooks of this request did, in their order: name, matched modules, rows, errors, metrics."""
    flags: tuple[RequestFlag, ...] = ()
    """What probes found in prompt and answer: one for each probe and module that found something."""


Event: TypeAlias = Token | Finished
