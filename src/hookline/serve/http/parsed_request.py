"""Turn the bodies of requests that generate into requests to the engine.

The app calls `parse_completion` and `parse_chat` with a body that FastAPI has read, and answers the `ParsedRequest`
that they return.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hookline.serve.generation_request import GenerationRequest, StatesWanted
from hookline.serve.http.engine_state import Serving
from hookline.serve.http.error_answers import Refused
from hookline.serve.http.hook_routes import specs_of_request
from hookline.serve.http.http_settings import Settings, check_answers_wanted
from hookline.serve.http.request_bodies import (
    REQUEST_NAME,
    ChatBody,
    ChatMessage,
    CompletionBody,
    HiddenStatesBody,
    RequestHooks,
)

__all__ = ["ParsedRequest", "parse_chat", "parse_completion"]

_COMPLETION_LENGTH: Final = 16
"""OpenAI's."""
_CHAT_LENGTH: Final = 1024
"""Of a model that does not say how long a sequence may be; of others, as many as there is room for, as OpenAI's."""


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
    allow: tuple[str, ...] = ()
    """What paths of factories of its hooks may begin with."""

    @property
    def has_states(self) -> bool:
        """Return whether hidden states are to be sent."""
        return self.requests[0].states is not None

    @property
    def has_hooks(self) -> bool:
        """Return whether it brings hooks of its own."""
        return bool(self.requests[0].hooks)


async def parse_completion(
    body: CompletionBody, serving: Serving, settings: Settings, name: str | None = None
) -> ParsedRequest:
    """Return the requests of a ``/v1/completions`` body; `name` is what the client calls it."""
    _check_model(body.model, settings)
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
    wanted = _Prompts("cmpl", name, prompts, echoes, _or(body.n, 1), body.seed)
    return _parsed(wanted, options, body.hooks, settings)


async def parse_chat(body: ChatBody, serving: Serving, settings: Settings, name: str | None = None) -> ParsedRequest:
    """Return the requests of a ``/v1/chat/completions`` body; the model's chat template makes the prompt."""
    _check_model(body.model, settings)
    if body.top_logprobs is not None and not body.logprobs:
        raise Refused(400, "top_logprobs comes with logprobs; set logprobs to true.", param="$.top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens):
        raise Refused(400, "max_tokens and max_completion_tokens are one option; give one.", param="$.max_tokens")
    _check_count("", _or(body.n, 1), settings)
    messages = [_message(each) for each in body.messages]
    prompt = await serving.tokens_of_chat(messages, body.chat_template_kwargs or {})
    length = _or(body.max_completion_tokens, body.max_tokens)
    options = {
        "max_tokens": _room(serving, prompt) if length is None else length,
        "temperature": _or(body.temperature, 1.0),
        "top_p": _or(body.top_p, 1.0),
        "top_k": _or(body.top_k, 0),
        "stop": _several(body.stop),
        "ignore_eos": bool(body.ignore_eos),
        "logprobs": _or(body.top_logprobs, 0) if body.logprobs else None,
    }
    wanted = _Prompts("chatcmpl", name, [prompt], [""], _or(body.n, 1), body.seed)
    return _parsed(wanted, options, body.hooks, settings)


def _check_model(name: str | None, settings: Settings) -> None:
    if name not in (None, settings.model_name):
        raise Refused(404, f"There is no model {name!r} here; there is {settings.model_name!r}.", param="$.model")


def _message(message: ChatMessage) -> dict[str, str]:
    """Return a message as chat templates take it; one of text parts becomes one text, as vLLM makes it."""
    given = message.content
    content = given if isinstance(given, str) else "\n".join(part.text for part in given)
    made: dict[str, str] = {"role": message.role, "content": content}
    return made if message.name is None else {**made, "name": message.name}


def _room(serving: Serving, prompt: tuple[int, ...]) -> int:
    """Return how many tokens an answer may have; 1 where there is no room, which the engine refuses with the sum."""
    most = serving.ready().max_sequence
    return _CHAT_LENGTH if most is None else max(1, most - len(prompt))


@dataclass(frozen=True)
class _Prompts:
    """Prompts and options of a body, except those of sampling."""

    prefix: str
    """What an id begins with that the server makes up."""
    name: str | None
    """What the client calls the request."""
    prompts: list[tuple[int, ...]]
    echoes: list[str]
    copies: int
    seed: int | None


def _parsed(
    wanted: _Prompts, options: Mapping[str, Any], hooks: RequestHooks | None, settings: Settings
) -> ParsedRequest:
    states = None if hooks is None else hooks.hidden_states
    specs = () if hooks is None or hooks.hooks is None else tuple(specs_of_request(hooks.hooks, settings))
    name = f"{wanted.prefix}-{uuid.uuid4().hex}" if wanted.name is None else _checked_name(wanted.name)
    pairs = [(prompt, copy) for prompt in wanted.prompts for copy in range(wanted.copies)]
    is_exact = wanted.name is not None and len(pairs) == 1  # hooks then know it by just the name that was given
    requests = [
        GenerationRequest(
            name if is_exact else f"{name}-{index}",
            prompt,
            seed=None if wanted.seed is None else wanted.seed + copy,
            states=_states(states),
            hooks=specs,
            **options,
        )
        for index, (prompt, copy) in enumerate(pairs)
    ]
    echoes = [echo for echo in wanted.echoes for _ in range(wanted.copies)]
    tokens = sum(map(len, wanted.prompts))
    return ParsedRequest(name, requests, echoes, tokens, settings.allow_requests)


def _checked_name(name: str) -> str:
    """Return the name; raise for one that is no name, or that a pattern could not be told from."""
    if re.fullmatch(REQUEST_NAME, name) is None or name.endswith("\n"):
        raise Refused(
            400,
            "X-Request-Id names a request with 1 to 128 letters, digits, dots, colons, hyphens or underscores, got "
            f"{name[:200]!r}.",
            param="X-Request-Id",
        )
    return name


def _states(wanted: HiddenStatesBody | None) -> StatesWanted | None:
    if wanted is None:
        return None
    positions = wanted.positions if isinstance(wanted.positions, str) else tuple(wanted.positions)
    return StatesWanted(tuple(wanted.layers), positions, wanted.phase, wanted.of)


def _check_count(given: Any, copies: int, settings: Settings) -> None:
    """Raise for too many answers, before work goes into the prompts."""
    is_one = isinstance(given, str) or isinstance(given[0], int)
    check_answers_wanted(settings, copies * (1 if is_one else len(given)))


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
