"""Check the bodies of requests, and turn those that generate into requests to the engine.

FastAPI reads JSON into the body classes; the app calls `parse_completion` and `parse_generate`, and the hook
routes read `HookBody`. Strict on purpose: the text ``"5"`` is no number and an unknown key is an error, because a
mistyped option that is passed over is found late.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from hookline.serve.generation_request import GenerationRequest, StatesWanted
from hookline.serve.http.engine_state import Serving
from hookline.serve.http.error_answers import Refused
from hookline.serve.http.http_settings import Settings

__all__ = [
    "KEYS",
    "CompletionBody",
    "GenerateBody",
    "HiddenStatesBody",
    "HookBody",
    "ParsedRequest",
    "RequestHooks",
    "SamplingParams",
    "parse_completion",
    "parse_generate",
]

_LIMIT: Final = 1 << 31
_INT64: Final = (1 << 63) - 1
_MOST_KEYS: Final = 64
"""Of one object; the largest body that there is has half as many. Without a bound, 300 000 unknown keys of a body
of 4 MB blocked all clients for 6 s. For the same reason lists end at their first mistake: 20 s and 2 GB without."""

TokenId = Annotated[int, Field(ge=0, lt=_LIMIT)]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, StringConstraints(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)]
Name = Annotated[str, StringConstraints(max_length=1000)]
ManyTokens = Annotated[list[Tokens], Field(min_length=1, max_length=1024, fail_fast=True)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Field(max_length=16, fail_fast=True)]
Seed = Annotated[int, Field(ge=-_INT64 - 1, le=_INT64)]
Length = Annotated[int, Field(ge=0, lt=_LIMIT)]
Count = Annotated[int, Field(ge=1, lt=_LIMIT)]
Position = Annotated[int, Field(gt=-_LIMIT, lt=_LIMIT)]
Positions = Annotated[list[Position], Field(min_length=1, max_length=1 << 16, fail_fast=True)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Probability = Annotated[float, Field(gt=0, le=1)]


class _RequestBody(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _limit_keys(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > _MOST_KEYS:
            raise PydanticCustomError("too_many_keys", "this has more than {most} keys", {"most": _MOST_KEYS})
        return given


class HiddenStatesBody(_RequestBody):
    """The hidden states of this request to send back."""

    layers: Texts
    """Modules, by name or pattern: ``model.layers.#`` are all blocks, ``model.norm`` the last norm."""
    positions: Literal["all", "last"] | Positions = "all"
    """Places in prompt and answer, from 0; negative ones count from the end of the prompt; ``last``: the last token of
    each forward."""
    phase: Literal["prefill", "decode", "both"] = "both"
    """Of the prompt, of the answer, or of both."""
    of: Literal["output", "input"] = "output"
    """What the module gives, or what it gets."""
    as_: Annotated[Literal["base64", "safetensors"], Field(alias="as")] = "base64"
    """base64 in the JSON answer, or the whole answer as a safetensors file with the JSON in its metadata."""


class RequestHooks(_RequestBody):
    """Hooks that live for this one request."""

    hidden_states: HiddenStatesBody | None = None
    """Send these hidden states back."""


class StreamOptions(_RequestBody):
    """Options of a stream."""

    include_usage: bool | None = None
    """One more event before the end, with the usage."""


class CompletionBody(_RequestBody):
    """``POST /v1/completions``: the body of OpenAI's completions, and ``hooks``."""

    model: str | None = None
    """The served model's name, or nothing."""
    prompt: Text | Texts | Tokens | ManyTokens
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    max_tokens: Length | None = None
    """The longest answer, in tokens; 16 if left out. 0 runs the prompt alone, for its hidden states."""
    temperature: Temperature | None = None
    """0 is greedy; 1 if left out."""
    top_p: Probability | None = None
    """Sample from the likeliest tokens that together have this probability."""
    top_k: Annotated[int, Field(ge=0, lt=_LIMIT)] | None = None
    """Sample from so many of the likeliest tokens; 0 from all. (Not of OpenAI.)"""
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    """How many answers to each prompt; with a seed, the i-th has seed + i."""
    stop: Stop | Stops | None = None
    """The answer ends before any of these texts."""
    seed: Seed | None = None
    """Makes sampling repeatable."""
    stream: bool | None = None
    """Server-sent events, one for each piece of text, then ``data: [DONE]``."""
    stream_options: StreamOptions | None = None
    """How to stream."""
    echo: bool | None = None
    """Put the prompt before the answer."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Log-probabilities of the chosen tokens, and of so many of the likeliest."""
    user: str | None = None
    """Taken and not used."""
    ignore_eos: bool | None = None
    """Go on after the end-of-text token. (Not of OpenAI.)"""
    hooks: RequestHooks | None = None
    """Hooks of this request. (Not of OpenAI.)"""
    # What OpenAI's clients may send, and means nothing here: only the value that asks for nothing is taken.
    best_of: Literal[1] | None = None
    """Not done: 1 or nothing."""
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    """Not done: 0 or nothing."""
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    """Not done: 0 or nothing."""
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    """Not done: empty or nothing."""
    suffix: Annotated[str, StringConstraints(max_length=0)] | None = None
    """Not done: empty or nothing."""


class SamplingParams(_RequestBody):
    """Options of sampling for ``/generate``."""

    max_new_tokens: Length | None = None
    """The longest answer, in tokens; 128 if left out. 0 runs the prompt alone, for its hidden states."""
    temperature: Temperature | None = None
    """0 is greedy; 1 if left out."""
    top_p: Probability | None = None
    """Sample from the likeliest tokens that together have this probability."""
    top_k: Annotated[int, Field(ge=-1, lt=_LIMIT)] | None = None
    """Sample from so many of the likeliest tokens; 0 and -1 from all."""
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    """How many answers to each prompt."""
    stop: Stop | Stops | None = None
    """The answer ends before any of these texts."""
    sampling_seed: Seed | None = None
    """Makes sampling repeatable."""
    ignore_eos: bool | None = None
    """Go on after the end-of-text token."""


class GenerateBody(_RequestBody):
    """``POST /generate``: a text or token ids, one or a list of them."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["text"]}, {"required": ["input_ids"]}]})

    text: Text | Texts | None = None
    """The prompt, or several; or else ``input_ids``."""
    input_ids: Tokens | ManyTokens | None = None
    """The prompt as token ids, or several; or else ``text``."""
    sampling_params: SamplingParams | None = None
    """How to choose tokens."""
    stream: bool | None = None
    """Server-sent events, each with the text so far, then ``data: [DONE]``."""
    return_logprob: bool | None = None
    """Add the log-probabilities of the chosen tokens."""
    hooks: RequestHooks | None = None
    """Hooks of this request."""


class HookBody(_RequestBody):
    """``POST /hooks``: a hook to attach, as hook files have them; see `hookline.HookSpec`."""

    name: Name | None = None
    """For logs and ``GET /hooks``."""
    target_modules: Text | Texts
    """Modules, by name or pattern."""
    hook_factory: Text
    """``package.module:factory``, one that the server's allow-list has."""
    config: dict[str, Any] | None = None
    """What the factory is called with; lists and objects in it go 32 deep at most."""
    on: Text | None = None
    """The kind of hook; ``forward`` if left out."""
    observe: bool | None = None
    """Ignore what the hook returns."""
    every: Count | None = None
    """Run it in every n-th forward of the model."""
    sees: Literal["edited", "raw"] | None = None
    """What an observer is shown."""
    exclude: Text | Annotated[list[Text], Field(max_length=1024, fail_fast=True)] | None = None
    """Modules to leave out."""
    enabled: Literal[True] | None = None
    """A hook that is sent is meant to be on."""
    on_error: Literal["disable", "warn"] | None = None
    """What becomes of a hook that raises; ``disable`` if left out. A request never fails for it."""


_ASKED: Final = (CompletionBody, GenerateBody, SamplingParams, HookBody, RequestHooks, HiddenStatesBody, StreamOptions)
KEYS: Final = tuple(sorted({field.alias or name for each in _ASKED for name, field in each.model_fields.items()}))
"""Every key that some body takes, for suggestions."""


_COMPLETION_LENGTH: Final = 16
"""OpenAI's."""
_GENERATE_LENGTH: Final = 128
"""SGLang's."""


@dataclass(frozen=True)
class ParsedRequest:
    """One HTTP request, as the engine takes it."""

    id: str
    requests: list[GenerationRequest]
    """One for each answer: of the first prompt ``n``, then of the second, …"""
    echoes: list[str]
    """What goes before each answer."""
    prompt_tokens: int
    """Of all prompts; each counts once, however many answers it gets."""
    states_as: Literal["base64", "safetensors"]
    is_one: bool
    """Whether one answer was asked for, not a list of them."""

    @property
    def has_states(self) -> bool:
        """Return whether hidden states are to be sent."""
        return self.requests[0].states is not None


async def parse_completion(body: CompletionBody, serving: Serving, settings: Settings) -> ParsedRequest:
    """Return the requests of a ``/v1/completions`` body."""
    if body.model not in (None, settings.model_name):
        raise Refused(404, f"There is no model {body.model!r} here; there is {settings.model_name!r}.", param="$.model")
    if body.echo and body.logprobs is not None:
        raise Refused(400, "echo with logprobs would need those of the prompt, which are not computed.", param="$.echo")
    options = {
        "max_tokens": _or(body.max_tokens, _COMPLETION_LENGTH),
        "temperature": _or(body.temperature, 1.0),
        "top_p": _or(body.top_p, 1.0),
        "top_k": _or(body.top_k, 0),
        "stop": _several(body.stop),
        "ignore_eos": bool(body.ignore_eos),
        "logprobs": body.logprobs,
    }
    _check_count(body.prompt, _or(body.n, 1), settings)
    prompts = await _prompts(body.prompt, serving)
    echoes = [_echo(body, prompt, serving) for prompt in prompts]
    wanted = _Prompts("cmpl", prompts, echoes, _or(body.n, 1), body.seed, bool(body.stream), is_one=True)
    return _parsed(wanted, options, body.hooks)


async def parse_generate(body: GenerateBody, serving: Serving, settings: Settings) -> ParsedRequest:
    """Return the requests of a ``/generate`` body."""
    given = body.text if body.text is not None else body.input_ids
    if given is None or (body.text is not None and body.input_ids is not None):
        raise Refused(400, "A prompt comes as text or as input_ids; give one of the two.", param="$.text")
    sampling = body.sampling_params or SamplingParams()
    options = {
        "max_tokens": _or(sampling.max_new_tokens, _GENERATE_LENGTH),
        "temperature": _or(sampling.temperature, 1.0),
        "top_p": _or(sampling.top_p, 1.0),
        "top_k": max(_or(sampling.top_k, 0), 0),
        "stop": _several(sampling.stop),
        "ignore_eos": bool(sampling.ignore_eos),
        "logprobs": 0 if body.return_logprob else None,
    }
    copies = _or(sampling.n, 1)
    _check_count(given, copies, settings)
    prompts = await _prompts(given, serving)
    is_one = copies == 1 and (isinstance(given, str) or isinstance(given[0], int))
    wanted = _Prompts(
        "gen", prompts, [""] * len(prompts), copies, sampling.sampling_seed, bool(body.stream), is_one=is_one
    )
    return _parsed(wanted, options, body.hooks)


@dataclass(frozen=True)
class _Prompts:
    """Prompts and options of a body, except those of sampling."""

    prefix: str
    prompts: list[tuple[int, ...]]
    echoes: list[str]
    copies: int
    seed: int | None
    stream: bool
    is_one: bool


def _parsed(wanted: _Prompts, options: Mapping[str, Any], hooks: RequestHooks | None) -> ParsedRequest:
    states = None if hooks is None else hooks.hidden_states
    if states is not None and states.as_ == "safetensors" and wanted.stream:
        raise Refused(
            400,
            "as='safetensors' is a whole body, and a stream has none; ask for base64.",
            param="$.hooks.hidden_states.as",
        )
    name = f"{wanted.prefix}-{uuid.uuid4().hex}"
    pairs = [(prompt, copy) for prompt in wanted.prompts for copy in range(wanted.copies)]
    requests = [
        GenerationRequest(
            f"{name}-{index}",
            prompt,
            seed=None if wanted.seed is None else wanted.seed + copy,
            states=_states(states),
            **options,
        )
        for index, (prompt, copy) in enumerate(pairs)
    ]
    echoes = [echo for echo in wanted.echoes for _ in range(wanted.copies)]
    tokens = sum(map(len, wanted.prompts))
    return ParsedRequest(name, requests, echoes, tokens, "base64" if states is None else states.as_, wanted.is_one)


def _states(wanted: HiddenStatesBody | None) -> StatesWanted | None:
    if wanted is None:
        return None
    positions = wanted.positions if isinstance(wanted.positions, str) else tuple(wanted.positions)
    return StatesWanted(tuple(wanted.layers), positions, wanted.phase, wanted.of)


def _check_count(given: Any, copies: int, settings: Settings) -> None:
    """Raise for too many answers, before work goes into the prompts."""
    is_one = isinstance(given, str) or isinstance(given[0], int)
    count = copies * (1 if is_one else len(given))
    if count > settings.max_sequences:
        raise Refused(400, f"This asks for {count} answers at once, and {settings.max_sequences} is the most.")


async def _prompts(given: Any, serving: Serving) -> list[tuple[int, ...]]:
    """Return the prompts in tokens; `given` is text, texts, tokens, or lists of tokens."""
    if isinstance(given, str):
        return [await serving.tokens_of(given)]
    if isinstance(given[0], str):
        return [await serving.tokens_of(each) for each in given]
    if isinstance(given[0], int):
        return [tuple(given)]
    return [tuple(each) for each in given]


def _echo(body: CompletionBody, prompt: tuple[int, ...], serving: Serving) -> str:
    if not body.echo:
        return ""
    return body.prompt if isinstance(body.prompt, str) else serving.text_of(prompt)


def _several(stop: str | list[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
