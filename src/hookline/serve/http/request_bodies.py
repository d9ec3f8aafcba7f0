"""Check the bodies of requests, and make requests to the engine of those that generate.

FastAPI reads JSON into these classes; the app calls their ``requests`` and hands those to the engine. Strict on
purpose: the text ``"5"`` is no number and an unknown key is an error, because a mistyped option that is passed over is
found late.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, model_validator
from pydantic.dataclasses import dataclass

from hookline.engines.request_options import CHECKED, RequestOptions, without_nulls
from hookline.errors import OptionError
from hookline.serve.generation_request import GenerationRequest, Length, Sampling, Temperature
from hookline.serve.http.error_answers import Refused

if TYPE_CHECKING:
    from hookline.serve.http.app import Serving
    from hookline.serve.http.request_gate import Settings

_LIMIT: Final = 1 << 31
_MOST_KEYS: Final = 64
"""Of one object; the largest body that there is has half as many. Without a bound, 300 000 unknown keys of a body
of 4 MB blocked all clients for 6 s. For the same reason lists end at their first mistake: 20 s and 2 GB without."""
_COMPLETION_LENGTH: Final = 16
"""OpenAI's."""
_CHAT_LENGTH: Final = 1024
"""Of a model that does not say how long a sequence may be; of others, as many as there is room for, as OpenAI's."""

_AnyText = Annotated[StrictStr, Field(min_length=0)]
"""With a length, pydantic refuses half characters, which no tokenizer takes."""
_Text = Annotated[StrictStr, Field(min_length=1)]
_Texts = Annotated[list[_Text], Field(min_length=1, max_length=1024, fail_fast=True)]
_Tokens = Annotated[
    list[Annotated[StrictInt, Field(ge=0, lt=_LIMIT)]], Field(min_length=1, fail_fast=True, title="token ids")
]
_ManyTokens = Annotated[list[_Tokens], Field(min_length=1, max_length=1024, fail_fast=True)]
_Count = Annotated[StrictInt, Field(ge=0, le=20)]


class _Body:
    """Read an object of a client, in which null is the same as nothing."""

    not_done: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """What OpenAI's clients may send that is not done here: keys, each with the values that ask for nothing."""
    passed_over: ClassVar[Collection[str]] = ()
    """What they may send that asks for nothing, whatever it is."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if len(given) > _MOST_KEYS:
            raise OptionError(f"This has more than {_MOST_KEYS} keys.")
        for key, nothing in cls.not_done.items():
            if given.get(key) not in (None, *nothing):
                raise OptionError(f"{key} is not done here; leave it out.")
        left_out = {*cls.not_done, *cls.passed_over}
        return without_nulls({key: value for key, value in given.items() if key not in left_out})


@dataclass(frozen=True, config=CHECKED)
class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: StrictBool = False
    """One more event before the end, with the usage."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class GenerationBody(Sampling, _Body):
    """What completions and chat completions share of OpenAI's bodies, and ``hooks``."""

    not_done: ClassVar = {"frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},)}
    passed_over: ClassVar = ("user", "metadata")

    model: StrictStr | None = None
    """The served model's name, or nothing."""
    temperature: Temperature = 1.0
    """0 is greedy."""
    n: Annotated[StrictInt, Field(ge=1, le=128)] = 1
    """How many answers to each prompt; with a seed, the i-th has seed + i."""
    stream: StrictBool = False
    """Server-sent events, one for each piece of text, then ``data: [DONE]``."""
    stream_options: StreamOptions | None = None
    """How to stream."""
    return_token_ids: StrictBool = False
    """Add the token ids of each answer, as ``token_ids``. (Not of OpenAI; vLLM has it.)"""
    hooks: RequestOptions = RequestOptions()
    """Hidden states and hooks of this request. (Not of OpenAI.)"""

    def _check(self, settings: Settings, prompts: int = 1) -> None:
        """Raise for another model and for too many answers, before work goes into the prompts."""
        if self.model not in (None, settings.model_name):
            there = settings.model_name
            raise Refused(404, f"There is no model {self.model!r} here; there is {there!r}.", param="$.model")
        count = prompts * self.n
        if count > settings.max_sequences:
            raise Refused(400, f"This asks for {count} answers at once, and {settings.max_sequences} is the most.")

    def _requests(
        self, id: str, prompts: Sequence[tuple[int, ...]], *, max_tokens: int, logprobs: int | None
    ) -> list[GenerationRequest]:
        options = {each.name: getattr(self, each.name) for each in fields(Sampling)}
        options |= {"max_tokens": max_tokens, "logprobs": logprobs}
        options |= {"states": self.hooks.hidden_states, "hooks": self.hooks.hooks}
        copies = [(prompt, copy) for prompt in prompts for copy in range(self.n)]
        return [
            GenerationRequest(
                id if len(copies) == 1 else f"{id}-{place}",  # hooks know a single one by just the name that was given
                prompt,
                **{**options, "seed": None if self.seed is None else self.seed + copy},
            )
            for place, (prompt, copy) in enumerate(copies)
        ]


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class CompletionBody(GenerationBody):
    """``POST /v1/completions``: the body of OpenAI's completions, and ``hooks``."""

    not_done: ClassVar = {**GenerationBody.not_done, "best_of": (1,), "suffix": ("",), "echo": (False,)}

    prompt: _Text | _Texts | _Tokens | _ManyTokens
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    max_tokens: Length = _COMPLETION_LENGTH
    """The longest answer, in tokens. 0 runs the prompt alone, for its hidden states."""
    logprobs: _Count | None = None
    """Log-probabilities of the chosen tokens, and of so many of the likeliest."""

    async def requests(self, serving: Serving, settings: Settings, id: str) -> list[GenerationRequest]:
        """Return the requests to the engine, one for each answer: of the first prompt ``n``, then of the second, …"""
        given: Any = self.prompt
        given = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        self._check(settings, len(given))
        prompts = [await serving.tokens_of(each) if isinstance(each, str) else tuple(each) for each in given]
        return self._requests(id, prompts, max_tokens=self.max_tokens, logprobs=self.logprobs)


@dataclass(frozen=True, config=CHECKED)
class TextPart(_Body):
    """A piece of a message: text, the one kind that is served here."""

    type: Literal["text"]
    """``text``; pictures and sound are not served."""
    text: _AnyText
    """The text."""


_Parts = Annotated[list[TextPart], Field(min_length=1, max_length=1024, fail_fast=True)]


@dataclass(frozen=True, config=CHECKED)
class ChatMessage(_Body):
    """One message of a conversation; an answer of this server can be sent back as it came."""

    not_done: ClassVar = {"refusal": (), "audio": (), "function_call": (), "annotations": ([],), "tool_calls": ([],)}
    passed_over: ClassVar = ("name",)

    role: Literal["system", "developer", "user", "assistant"]
    """Who says it. ``developer`` becomes ``system`` where the model's template does not know it."""
    content: _AnyText | _Parts
    """A text, or a list of pieces of text, which are joined by line breaks."""

    def to_template(self) -> dict[str, str]:
        """Return the message as chat templates take it; one of text parts becomes one text, as vLLM makes it."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``: the body of OpenAI's chat completions, and ``hooks``."""

    not_done: ClassVar = {
        **GenerationBody.not_done,
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
    logprobs: StrictBool = False
    """Add the log-probabilities of the chosen tokens."""
    top_logprobs: _Count | None = None
    """And of so many of the likeliest; needs ``logprobs``."""

    async def requests(self, serving: Serving, settings: Settings, id: str) -> list[GenerationRequest]:
        """Return ``n`` requests for the prompt that the model's chat template makes."""
        self._check(settings)
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused(400, "top_logprobs comes with logprobs; set logprobs to true.", param="$.top_logprobs")
        lengths = [each for each in (self.max_completion_tokens, self.max_tokens) if each is not None]
        if len(lengths) > 1:
            raise Refused(400, "max_tokens and max_completion_tokens are one option; give one.", param="$.max_tokens")
        messages = [each.to_template() for each in self.messages]
        prompt = await serving.tokens_of_chat(messages)
        most = serving.ready().max_sequence
        # Where there is no room, 1, which the engine refuses with the sum.
        room = _CHAT_LENGTH if most is None else max(1, most - len(prompt))
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._requests(id, [prompt], max_tokens=lengths[0] if lengths else room, logprobs=logprobs)
