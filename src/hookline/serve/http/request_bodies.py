"""Check the bodies of requests, and make requests to the engine of those that generate.

FastAPI reads JSON into these classes; the app calls `CompletionBody.parse` and `ChatBody.parse` and answers the
`ParsedRequest`, and the hook routes read `HookBody`. Strict on purpose: the text ``"5"`` is no number and an unknown
key is an error, because a mistyped option that is passed over is found late.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from hookline.engines.hidden_states import StatesWanted
from hookline.engines.request_results import MOST_PATTERNS
from hookline.serve.generation_request import GenerationRequest
from hookline.serve.http.error_answers import Refused

if TYPE_CHECKING:
    from hookline.serve.http.engine_state import Serving
    from hookline.serve.http.http_settings import Settings

__all__ = [
    "ChatBody",
    "CompletionBody",
    "HiddenStatesBody",
    "HookBody",
    "ParsedRequest",
    "RequestHooks",
    "keys_at",
]

_LIMIT: Final = 1 << 31
_INT64: Final = (1 << 63) - 1
_MOST_KEYS: Final = 64
"""Of one object; the largest body that there is has half as many. Without a bound, 300 000 unknown keys of a body
of 4 MB blocked all clients for 6 s. For the same reason lists end at their first mistake: 20 s and 2 GB without."""
_REQUEST_NAME: Final = re.compile("[A-Za-z0-9._:-]{1,128}")
"""What a client may call its request: nothing that a pattern of names, or a line of a log, could be confused by."""
_COMPLETION_LENGTH: Final = 16
"""OpenAI's."""
_CHAT_LENGTH: Final = 1024
"""Of a model that does not say how long a sequence may be; of others, as many as there is room for, as OpenAI's."""

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


def _limited(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > _MOST_KEYS:
        raise PydanticCustomError("too_many_keys", "this has more than {most} keys", {"most": _MOST_KEYS})
    return given


Labels = Annotated[dict[str, str], Field(max_length=16), BeforeValidator(_limited)]
Variables = Annotated[dict[Name, str | int | float | bool | None], Field(max_length=16), BeforeValidator(_limited)]


@dataclass(frozen=True)
class ParsedRequest:
    """One HTTP request that generates, as the engine takes it."""

    id: str
    requests: list[GenerationRequest]
    """One for each answer: of the first prompt ``n``, then of the second, …"""
    echoes: list[str]
    """What goes before each answer."""
    prompt_tokens: int
    """Of all prompts; each counts once, however many answers it gets."""
    allow: tuple[str, ...] = ()
    """What paths of factories of its hooks may begin with."""
    include_usage: bool = False
    """Whether a stream ends with the usage."""
    with_ids: bool = False
    """Whether choices have the ids of their tokens."""

    @property
    def has_states(self) -> bool:
        """Return whether hidden states are to be sent."""
        return self.requests[0].states is not None

    @property
    def has_hooks(self) -> bool:
        """Return whether it brings hooks of its own."""
        return bool(self.requests[0].hooks)


class _RequestBody(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )
    not_done: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """What OpenAI's clients may send that means nothing here: keys, each with the values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_not_done(cls, given: Any) -> Any:
        if not isinstance(_limited(given), dict):
            return given
        for key, nothing in cls.not_done.items():
            if given.get(key) not in (None, *nothing):
                raise PydanticCustomError("not_done", "this is not done here; leave it out", {"key": key})
        return {key: value for key, value in given.items() if key not in cls.not_done}


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
    window: Annotated[list[Position | None], Field(min_length=2, max_length=2)] | None = None
    """First position and the one behind the last, such as ``[-8, null]``, instead of ``positions``."""

    def wanted(self) -> StatesWanted:
        """Return what the engine is asked for."""
        return StatesWanted.read(self.model_dump())


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
        if sum(1 if isinstance(each, str) else len(each) for each in lists) > MOST_PATTERNS:
            words = "this has more than {most} names and patterns of modules"
            raise PydanticCustomError("too_many_patterns", words, {"most": MOST_PATTERNS})
        return self


class StreamOptions(_RequestBody):
    """Options of a stream."""

    include_usage: bool | None = None
    """One more event before the end, with the usage."""


SpecsOf = Callable[[Sequence[HookBody]], Sequence[Mapping[str, Any]]]
"""Returns the specs of the hooks in a body, checked."""


class _GenerationBody(_RequestBody):
    """What completions and chat completions share of OpenAI's bodies, and ``hooks``."""

    not_done = {"frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},)}

    model: str | None = None
    """The served model's name, or nothing."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """0 is greedy; 1 if left out."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the likeliest tokens that together have this probability."""
    top_k: Length | None = None
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

    def _check(self, settings: Settings, prompts: int = 1) -> None:
        """Raise for another model and for too many answers, before work goes into the prompts."""
        if self.model not in (None, settings.model_name):
            there = settings.model_name
            raise Refused(404, f"There is no model {self.model!r} here; there is {there!r}.", param="$.model")
        count = prompts * _or(self.n, 1)
        if count > settings.max_sequences:
            raise Refused(400, f"This asks for {count} answers at once, and {settings.max_sequences} is the most.")

    def _parsed(
        self,
        prompts: Sequence[tuple[int, ...]],
        echoes: Sequence[str],
        settings: Settings,
        *,
        id: str,
        is_named: bool,
        specs_of: SpecsOf,
        max_tokens: int,
        logprobs: int | None,
        with_ids: bool = False,
    ) -> ParsedRequest:
        """Return the requests to the engine: ``n`` for each prompt."""
        copies = _or(self.n, 1)
        hooks = self.hooks or RequestHooks()
        options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": _or(self.temperature, 1.0),
            "top_p": _or(self.top_p, 1.0),
            "top_k": _or(self.top_k, 0),
            "stop": self.stop or (),
            "ignore_eos": bool(self.ignore_eos),
            "logprobs": logprobs,
            "states": None if hooks.hidden_states is None else hooks.hidden_states.wanted(),
            "hooks": tuple(specs_of(hooks.hooks or ())),
        }
        is_exact = is_named and len(prompts) * copies == 1  # hooks then know it by just the name that was given
        requests = [
            GenerationRequest(
                id if is_exact else f"{id}-{place * copies + copy}",
                prompt,
                seed=None if self.seed is None else self.seed + copy,
                **options,
            )
            for place, prompt in enumerate(prompts)
            for copy in range(copies)
        ]
        return ParsedRequest(
            id,
            requests,
            [echo for echo in echoes for _ in range(copies)],
            sum(map(len, prompts)),
            settings.allow_requests,
            self.stream_options is not None and bool(self.stream_options.include_usage),
            with_ids,
        )


class CompletionBody(_GenerationBody):
    """``POST /v1/completions``: the body of OpenAI's completions, and ``hooks``."""

    not_done = {**_GenerationBody.not_done, "best_of": (1,), "suffix": ("",)}

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

    async def parse(self, serving: Serving, settings: Settings, name: str | None, specs_of: SpecsOf) -> ParsedRequest:
        """Return the requests to the engine; `name` is what the client calls this one."""
        given: Any = self.prompt
        given = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        self._check(settings, len(given))
        if self.echo and self.logprobs is not None:
            said = "echo with logprobs would need those of the prompt, which are not computed."
            raise Refused(400, said, param="$.echo")
        prompts = [await serving.tokens_of(each) if isinstance(each, str) else tuple(each) for each in given]
        texts = [each if isinstance(each, str) else serving.text_of(tuple(each)) for each in given if self.echo]
        return self._parsed(
            prompts,
            texts or [""] * len(prompts),
            settings,
            id=_id("cmpl", name),
            is_named=name is not None,
            specs_of=specs_of,
            max_tokens=_or(self.max_tokens, _COMPLETION_LENGTH),
            logprobs=self.logprobs,
            with_ids=bool(self.return_token_ids),
        )


class TextPart(_RequestBody):
    """A piece of a message: text, the one kind that is served here."""

    type: Literal["text"]
    """``text``; pictures and sound are not served."""
    text: str
    """The text."""


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=1024, fail_fast=True)]


class ChatMessage(_RequestBody):
    """One message of a conversation; an answer of this server can be sent back as it came."""

    not_done = {"refusal": (), "audio": (), "function_call": (), "annotations": ([],), "tool_calls": ([],)}

    role: Literal["system", "developer", "user", "assistant"]
    """Who says it. ``developer`` becomes ``system`` where the model's template does not know it."""
    content: str | Parts
    """A text, or a list of pieces of text, which are joined by line breaks."""
    name: Name | None = None
    """Given to the template, most of which pass over it."""

    def to_template(self) -> dict[str, str]:
        """Return the message as chat templates take it; one of text parts becomes one text, as vLLM makes it."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        made: dict[str, str] = {"role": self.role, "content": content}
        return made if self.name is None else {**made, "name": self.name}


class ChatBody(_GenerationBody):
    """``POST /v1/chat/completions``: the body of OpenAI's chat completions, and ``hooks``."""

    not_done = {
        **_GenerationBody.not_done,
        "response_format": ({"type": "text"},),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "modalities": (["text"], []),
        "store": (False,),
    }

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

    async def parse(self, serving: Serving, settings: Settings, name: str | None, specs_of: SpecsOf) -> ParsedRequest:
        """Return the requests to the engine; the model's chat template makes the prompt."""
        self._check(settings)
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused(400, "top_logprobs comes with logprobs; set logprobs to true.", param="$.top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise Refused(400, "max_tokens and max_completion_tokens are one option; give one.", param="$.max_tokens")
        messages = [each.to_template() for each in self.messages]
        prompt = await serving.tokens_of_chat(messages, self.chat_template_kwargs or {})
        most = serving.ready().max_sequence
        # Where there is no room, 1, which the engine refuses with the sum.
        room = _CHAT_LENGTH if most is None else max(1, most - len(prompt))
        return self._parsed(
            [prompt],
            [""],
            settings,
            id=_id("chatcmpl", name),
            is_named=name is not None,
            specs_of=specs_of,
            max_tokens=_or(_or(self.max_completion_tokens, self.max_tokens), room),
            logprobs=_or(self.top_logprobs, 0) if self.logprobs else None,
        )


def _id(prefix: str, name: str | None) -> str:
    """Return the name that the client gave, or one made up; raise for what a pattern could not be told from."""
    if name is None:
        return f"{prefix}-{uuid.uuid4().hex}"
    if _REQUEST_NAME.fullmatch(name) is None:
        raise Refused(
            400,
            "X-Request-Id names a request with 1 to 128 letters, digits, dots, colons, hyphens or underscores, got "
            f"{name[:200]!r}.",
            param="X-Request-Id",
        )
    return name


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def keys_at(body: type[BaseModel], place: Sequence[str | int]) -> list[str]:
    """Return the keys that the object takes in which the last part of `place` is, for suggestions.

    Recipe: ``keys_at(CompletionBody, ("hooks", "hiden_states"))``.
    """
    found = body
    for part in place[:-1]:  # numbers are places in lists, and pydantic adds names of the kinds that it tried
        field = found.model_fields.get(str(part))
        found = (_body_in(field.annotation) if field is not None else None) or found
    return list(found.model_fields)


def _body_in(kind: Any) -> type[BaseModel] | None:
    """Return the first class of bodies in an annotation."""
    if isinstance(kind, type) and not get_args(kind):
        return kind if issubclass(kind, BaseModel) else None
    return next((each for each in map(_body_in, get_args(kind)) if each is not None), None)
