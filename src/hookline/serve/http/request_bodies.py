"""Check the bodies of requests.

FastAPI reads JSON into these classes; `parsed_request` turns those that generate into requests to the engine, and the
hook routes read `HookBody`. Strict on purpose: the text ``"5"`` is no number and an unknown key is an error, because a
mistyped option that is passed over is found late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

__all__ = [
    "REQUEST_NAME",
    "ChatBody",
    "ChatMessage",
    "CompletionBody",
    "HiddenStatesBody",
    "HookBody",
    "RequestHooks",
    "StreamOptions",
    "keys_at",
]

_LIMIT: Final = 1 << 31
_INT64: Final = (1 << 63) - 1
_MOST_KEYS: Final = 64
"""Of one object; the largest body that there is has half as many. Without a bound, 300 000 unknown keys of a body
of 4 MB blocked all clients for 6 s. For the same reason lists end at their first mistake: 20 s and 2 GB without."""

_MOST_PATTERNS: Final = 256
"""Of one request: each is held against every module, 256 of them for 0.4 s in a model of 423."""

TokenId = Annotated[int, Field(ge=0, lt=_LIMIT)]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, StringConstraints(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)]
Name = Annotated[str, StringConstraints(max_length=1000)]
REQUEST_NAME: Final = "^[A-Za-z0-9._:-]{1,128}$"
"""What a client may call its request: nothing that a pattern of names, or a line of a log, could be confused by."""
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


def _limited(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > _MOST_KEYS:
        raise PydanticCustomError("too_many_keys", "this has more than {most} keys", {"most": _MOST_KEYS})
    return given


def _not_done(nothing: Any, words: str) -> BeforeValidator:
    """Return a check of a key that means nothing here: any value but `nothing` is refused with `words`."""

    def check(given: Any) -> Any:
        if given != nothing:
            raise PydanticCustomError("not_done", "{words}", {"words": words})
        return given

    return BeforeValidator(check)


NoPenalty = Annotated[float, Field(ge=0, le=0), _not_done(0, "there are no penalties here; leave it out")]
NoTools = Annotated[list[Any], Field(max_length=0), _not_done([], "no tool is called here; leave it out")]
NoText = Annotated[str, StringConstraints(max_length=0), _not_done("", "this is not done here; leave it out")]
NoList = Annotated[list[Any], Field(max_length=0), _not_done([], "this is not done here; leave it out")]
NoWindow = Annotated[list[Any], Field(max_length=0), _not_done([], "a window is for vLLM alone; give positions here")]
NoBias = Annotated[dict[str, float], Field(max_length=0), _not_done({}, "there is no bias here; leave it out")]
Labels = Annotated[dict[str, str], Field(max_length=16), BeforeValidator(_limited)]
Variables = Annotated[dict[Name, str | int | float | bool | None], Field(max_length=16), BeforeValidator(_limited)]


class _RequestBody(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _limit_keys(cls, given: Any) -> Any:
        return _limited(given)


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
    window: NoWindow | None = None
    """Not done: on vLLM alone."""


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
    exclude: Text | Annotated[list[Text], Field(max_length=1024, fail_fast=True)] | None = None
    """Modules to leave out."""
    enabled: Literal[True] | None = None
    """A hook that is sent is meant to be on."""
    on_error: Literal["disable", "warn"] | None = None
    """What becomes of a hook that raises; ``disable`` if left out. A request never fails for it."""


class RequestHooks(_RequestBody):
    """Hooks that live for this one request."""

    hidden_states: HiddenStatesBody | None = None
    """Send these hidden states back."""
    hooks: Annotated[list[HookBody], Field(min_length=1, max_length=64, fail_fast=True)] | None = None
    """Attach these specs for this request alone: they see its rows, and change them alone."""

    @model_validator(mode="after")
    def _limit_patterns(self) -> RequestHooks:
        lists: list[str | list[str]] = [] if self.hidden_states is None else [self.hidden_states.layers]
        lists += [each for hook in self.hooks or () for each in (hook.target_modules, hook.exclude or [])]
        if sum(1 if isinstance(each, str) else len(each) for each in lists) > _MOST_PATTERNS:
            words = "this has more than {most} names and patterns of modules"
            raise PydanticCustomError("too_many_patterns", words, {"most": _MOST_PATTERNS})
        return self


class StreamOptions(_RequestBody):
    """Options of a stream."""

    include_usage: bool | None = None
    """One more event before the end, with the usage."""


class _GenerationBody(_RequestBody):
    """What completions and chat completions share of OpenAI's bodies, and ``hooks``."""

    model: str | None = None
    """The served model's name, or nothing."""
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
    user: str | None = None
    """Taken and not used."""
    ignore_eos: bool | None = None
    """Go on after the end-of-text token. (Not of OpenAI.)"""
    hooks: RequestHooks | None = None
    """Hooks of this request. (Not of OpenAI.)"""
    # What OpenAI's clients may send, and means nothing here: only the value that asks for nothing is taken.
    frequency_penalty: NoPenalty | None = None
    """Not done: 0 or nothing."""
    presence_penalty: NoPenalty | None = None
    """Not done: 0 or nothing."""
    logit_bias: NoBias | None = None
    """Not done: empty or nothing."""


class CompletionBody(_GenerationBody):
    """``POST /v1/completions``: the body of OpenAI's completions, and ``hooks``."""

    prompt: Text | Texts | Tokens | ManyTokens
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    max_tokens: Length | None = None
    """The longest answer, in tokens; 16 if left out. 0 runs the prompt alone, for its hidden states."""
    echo: bool | None = None
    """Put the prompt before the answer."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Log-probabilities of the chosen tokens, and of so many of the likeliest."""
    return_token_ids: bool | None = None
    """Add the token ids of the answer, as ``token_ids``. (Not of OpenAI; vLLM has it.)"""
    # What OpenAI's clients may send, and means nothing here: only the value that asks for nothing is taken.
    best_of: Literal[1] | None = None
    """Not done: 1 or nothing."""
    suffix: NoText | None = None
    """Not done: empty or nothing."""


class TextPart(_RequestBody):
    """A piece of a message: text, the one kind that is served here."""

    type: Literal["text"]
    """``text``; pictures and sound are not served."""
    text: str
    """The text."""


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=1024, fail_fast=True)]


class ChatMessage(_RequestBody):
    """One message of a conversation; an answer of this server can be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant"]
    """Who says it. ``developer`` becomes ``system`` where the model's template does not know it."""
    content: str | Parts
    """A text, or a list of pieces of text, which are joined by line breaks."""
    name: Name | None = None
    """Given to the template, most of which pass over it."""
    # Keys of OpenAI's answers, which clients send back: only the value that says nothing is taken.
    refusal: None = None
    """Not done: nothing."""
    audio: None = None
    """Not done: nothing."""
    function_call: None = None
    """Not done: nothing."""
    annotations: NoList | None = None
    """Not done: empty or nothing."""
    tool_calls: NoTools | None = None
    """Not done: empty or nothing."""


class ResponseFormat(_RequestBody):
    """The form of the answer."""

    type: Literal["text"]
    """Not done: any form but text."""


class ChatBody(_GenerationBody):
    """``POST /v1/chat/completions``: the body of OpenAI's chat completions, and ``hooks``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    """The conversation, which the model's own chat template turns into a prompt."""
    max_completion_tokens: Length | None = None
    """The longest answer, in tokens; as many as the model has room for if left out."""
    max_tokens: Length | None = None
    """The older name of ``max_completion_tokens``."""
    logprobs: bool | None = None
    """Add the log-probabilities of the chosen tokens."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """And of so many of the likeliest; needs ``logprobs``."""
    chat_template_kwargs: Variables | None = None
    """More variables for the chat template, such as ``enable_thinking``. (Not of OpenAI.)"""
    metadata: Labels | None = None
    """Taken and not used."""
    # What OpenAI's clients may send, and means nothing here: only the value that asks for nothing is taken.
    response_format: ResponseFormat | None = None
    """Not done: text or nothing."""
    tools: NoTools | None = None
    """Not done: empty or nothing."""
    tool_choice: Literal["none", "auto"] | None = None
    """Not done: no tool is ever called."""
    parallel_tool_calls: bool | None = None
    """Not done: no tool is ever called."""
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    """Not done: any but text."""
    store: Literal[False] | None = None
    """Not done: false or nothing."""


def keys_at(body: type[BaseModel], place: Sequence[str | int]) -> list[str]:
    """Return the keys that the object takes in which the last part of `place` is, for suggestions.

    Those that are there to be refused are left out.

    Recipe: ``keys_at(CompletionBody, ("hooks", "hiden_states"))``.
    """
    found = body
    for part in place[:-1]:  # numbers are places in lists, and pydantic adds names of the kinds that it tried
        field = next((each for name, each in found.model_fields.items() if part in (name, each.alias)), None)
        found = (_body_in(field.annotation) if field is not None else None) or found
    fields = found.model_fields.items()
    return [field.alias or name for name, field in fields if not (field.description or "").startswith("Not done")]


def _body_in(kind: Any) -> type[BaseModel] | None:
    """Return the first class of bodies in an annotation."""
    if isinstance(kind, type) and not get_args(kind):
        return kind if issubclass(kind, BaseModel) else None
    return next((each for each in map(_body_in, get_args(kind)) if each is not None), None)
