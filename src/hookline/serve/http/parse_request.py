"""From the bodies of ``/v1/completions`` and ``/generate`` to what the engine is asked.

Takes checked bodies from `bodies`, hands `Asked` to `generating`: the same thing in one shape for both routes.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from hookline.serve.generation_request import Request, StatesWanted
from hookline.serve.http.engine_state import Serving
from hookline.serve.http.error_answers import Refused
from hookline.serve.http.http_settings import Settings
from hookline.serve.http.request_bodies import (
    CompletionBody,
    GenerateBody,
    HiddenStatesBody,
    RequestHooks,
    SamplingParams,
)

__all__ = ["Asked", "asked_by_completion", "asked_by_generate"]

_COMPLETION_LENGTH: Final = 16
"""OpenAI's."""
_GENERATE_LENGTH: Final = 128
"""SGLang's."""


@dataclass(frozen=True)
class Asked:
    """One HTTP request, as the engine takes it."""

    id: str
    requests: list[Request]
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
        """Whether hidden states are to be sent."""
        return self.requests[0].states is not None


async def asked_by_completion(body: CompletionBody, serving: Serving, settings: Settings) -> Asked:
    """What OpenAI's body comes to."""
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
    wanted = _Wanted("cmpl", prompts, echoes, _or(body.n, 1), body.seed, bool(body.stream), is_one=True)
    return _asked(wanted, options, body.hooks)


async def asked_by_generate(body: GenerateBody, serving: Serving, settings: Settings) -> Asked:
    """What ``/generate``'s body comes to."""
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
    wanted = _Wanted(
        "gen", prompts, [""] * len(prompts), copies, sampling.sampling_seed, bool(body.stream), is_one=is_one
    )
    return _asked(wanted, options, body.hooks)


@dataclass(frozen=True)
class _Wanted:
    """What is asked, but for how tokens are chosen."""

    prefix: str
    prompts: list[tuple[int, ...]]
    echoes: list[str]
    copies: int
    seed: int | None
    stream: bool
    is_one: bool


def _asked(wanted: _Wanted, options: Mapping[str, Any], hooks: RequestHooks | None) -> Asked:
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
        Request(
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
    return Asked(name, requests, echoes, tokens, "base64" if states is None else states.as_, wanted.is_one)


def _states(wanted: HiddenStatesBody | None) -> StatesWanted | None:
    if wanted is None:
        return None
    positions = wanted.positions if isinstance(wanted.positions, str) else tuple(wanted.positions)
    return StatesWanted(tuple(wanted.layers), positions, wanted.phase, wanted.of)


def _check_count(given: Any, copies: int, settings: Settings) -> None:
    """Raise if that are too many answers, before work goes into the prompts."""
    is_one = isinstance(given, str) or isinstance(given[0], int)
    count = copies * (1 if is_one else len(given))
    if count > settings.max_sequences:
        raise Refused(400, f"This asks for {count} answers at once, and {settings.max_sequences} is the most.")


async def _prompts(given: Any, serving: Serving) -> list[tuple[int, ...]]:
    """The prompts in tokens: text, texts, tokens, or lists of tokens."""
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
