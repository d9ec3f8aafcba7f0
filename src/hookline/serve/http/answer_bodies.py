"""Describe the bodies of answers for ``/openapi.json``; those of requests are in `request_bodies`.

FastAPI reads these classes for the description alone: routes make answers as dictionaries, which are not checked again
on their way out. That they fit is tested (tests/serve/test_openapi.py).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

__all__ = [
    "ChatCompletion",
    "Completion",
    "ErrorAnswer",
    "FoundModules",
    "Generated",
    "Health",
    "HookAnswer",
    "HookList",
    "ModelList",
]


class _AnswerBody(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)


class ErrorText(_AnswerBody):
    """The error."""

    message: str
    """What was asked, what was found, what to do."""
    type: str
    """The kind of error; one for each status."""
    param: str | None
    """Which part of the body, as ``$.prompt[0]``."""
    code: int
    """The status code."""


class ErrorAnswer(_AnswerBody):
    """Every answer that is not a success, in the shape that OpenAI's clients understand."""

    error: ErrorText


class StatesAnswer(_AnswerBody):
    """Hidden states of one layer."""

    dtype: str
    """As torch calls it: ``float32``, ``bfloat16``, …"""
    shape: list[int]
    """Rows, one for each position, and features."""
    positions: list[int]
    """Which token of prompt and answer each row belongs to."""
    data: str | None = None
    """The numbers, row by row, little-endian, in base64."""
    tensor: str | None = None
    """In a safetensors answer: the name of the tensor."""


class FlagAnswer(_AnswerBody):
    """What one probe found at one module."""

    probe: str
    """Its name."""
    module: str
    tokens: int
    """How many tokens scored over the threshold."""
    position: int | None
    """Which token of prompt and answer was the first of them, from 0."""
    score: float
    """The highest score."""
    stopped: bool
    """Whether it has ended the answer."""


class RequestHookAnswer(_AnswerBody):
    """What one hook of this request did."""

    name: str
    matched: list[str]
    """The modules that it was on."""
    rows: int
    """How many tokens it has seen, at all modules together."""
    errors: int
    """How often it raised; the first error switches it off, unless ``on_error`` is ``warn``."""
    last_error: str | None
    metrics: dict[str, float | None]
    """What it measured; null for what is no finite number."""


class HooksAnswer(_AnswerBody):
    """Results of the hooks of this request."""

    hidden_states: dict[str, StatesAnswer] | None = None
    """Of the layers that the request asked for."""
    hooks: list[RequestHookAnswer] | None = None
    """What the hooks of this request did, in their order."""
    flags: list[FlagAnswer] | None = None
    """What probes found; not there if they found nothing."""


class Logprobs(_AnswerBody):
    """Log-probabilities, token by token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None]] | None
    text_offset: list[int]


class Choice(_AnswerBody):
    """One answer."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None
    hooks: HooksAnswer | None = None


class Usage(_AnswerBody):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(_AnswerBody):
    """The answer to ``/v1/completions``; a stream has events of this shape, without usage."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class TokenLogprob(_AnswerBody):
    """One token and its log-probability; -9999 for a token that is all but impossible."""

    token: str
    logprob: float
    bytes: list[int] | None
    """The text in UTF-8; nothing for a token that is part of a character."""


class ChosenLogprob(TokenLogprob):
    """A token of the answer, and the likeliest in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_AnswerBody):
    """Log-probabilities of an answer, token by token."""

    content: list[ChosenLogprob]
    refusal: None


class AnsweredMessage(_AnswerBody):
    """The message that the model answers."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_AnswerBody):
    """One answer."""

    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    hooks: HooksAnswer | None = None


class ChatCompletion(_AnswerBody):
    """The answer to ``/v1/chat/completions``; events of a stream have ``delta`` in the place of ``message``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FinishReason(_AnswerBody):
    """The reason for the end of an answer."""

    type: Literal["stop", "length"]


class MetaInfo(_AnswerBody):
    """About one answer of ``/generate``."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    output_token_logprobs: list[tuple[float | None, int]] | None = None
    """The log-probability and the id of each token."""


class Generated(_AnswerBody):
    """One answer of ``/generate``."""

    index: int | None = None
    """In a stream of several answers: which."""
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    hooks: HooksAnswer | None = None


class HookAnswer(_AnswerBody):
    """A hook that is attached, or was until now."""

    id: str
    name: str
    hook_factory: str
    target_modules: list[str]
    on: str
    observe: bool
    every: int | None
    on_error: str
    config: dict[str, Any]
    """A long list of numbers is shortened."""
    matched: list[str]
    """The modules it sits on."""
    origin: Literal["start", "http"]
    fired: int
    """How often it ran."""
    last_step: int | None
    """The forward in which it last ran."""
    cost_us: float | None
    """Microseconds of the host that one run takes, on average."""
    errors: int
    off: bool
    """Switched off, because it raised."""
    last_error: str | None


class HookList(_AnswerBody):
    """The attached hooks."""

    hooks: list[HookAnswer]


class ModuleAnswer(_AnswerBody):
    """A module of the model that is served."""

    name: str
    """As hooks and hidden states name it; empty for the model itself."""
    type: str
    """Its class."""
    parameters: int
    """How many numbers it has in its parameters, with those of the modules in it."""
    width: int | None
    """How many numbers its output has for each token: the length of a vector for `steer`. None if it has no row for
    each token."""


class FoundModules(_AnswerBody):
    """The modules that a pattern matches."""

    modules: list[ModuleAnswer]


class Model(_AnswerBody):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(_AnswerBody):
    """The models that are served: one."""

    object: Literal["list"]
    data: list[Model]


class Health(_AnswerBody):
    """The state of the server."""

    status: Literal["loading", "ready", "draining", "failed"]
