"""The bodies of requests, as pydantic checks them and ``/openapi.json`` shows them.

Takes JSON that FastAPI has read, hands checked objects to `generating` and `hook_bodies`. Strict on purpose: the
text ``"5"`` is no number and an unknown key is an error, because a mistyped option that is passed over is found late.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

__all__ = [
    "KEYS",
    "CompletionBody",
    "GenerateBody",
    "HiddenStatesBody",
    "HookBody",
    "RequestHooks",
    "SamplingParams",
]

MOST: Final = 1 << 31
_INT64: Final = (1 << 63) - 1
_MOST_KEYS: Final = 64
"""Of one object; the largest body that there is has half as many. Without a bound, 300 000 unknown keys of a body
of 4 MB kept everybody waiting for 6 s. For the same reason lists end at their first mistake: 20 s and 2 GB without."""

TokenId = Annotated[int, Field(ge=0, lt=MOST)]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, StringConstraints(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)]
Name = Annotated[str, StringConstraints(max_length=1000)]
ManyTokens = Annotated[list[Tokens], Field(min_length=1, max_length=1024, fail_fast=True)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Field(max_length=16, fail_fast=True)]
Seed = Annotated[int, Field(ge=-_INT64 - 1, le=_INT64)]
Length = Annotated[int, Field(ge=0, lt=MOST)]
Count = Annotated[int, Field(ge=1, lt=MOST)]
Place = Annotated[int, Field(gt=-MOST, lt=MOST)]
Positions = Annotated[list[Place], Field(min_length=1, max_length=1 << 16, fail_fast=True)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Probability = Annotated[float, Field(gt=0, le=1)]


class _Asked(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _has_few_keys(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > _MOST_KEYS:
            raise PydanticCustomError("too_many_keys", "this has more than {most} keys", {"most": _MOST_KEYS})
        return given


class HiddenStatesBody(_Asked):
    """Which hidden states of this request to send back."""

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


class RequestHooks(_Asked):
    """Hooks that live for this one request."""

    hidden_states: HiddenStatesBody | None = None
    """Send these hidden states back."""


class StreamOptions(_Asked):
    """How to stream."""

    include_usage: bool | None = None
    """One more event before the end, with the usage."""


class CompletionBody(_Asked):
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
    top_k: Annotated[int, Field(ge=0, lt=MOST)] | None = None
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


class SamplingParams(_Asked):
    """How ``/generate`` chooses tokens."""

    max_new_tokens: Length | None = None
    """The longest answer, in tokens; 128 if left out. 0 runs the prompt alone, for its hidden states."""
    temperature: Temperature | None = None
    """0 is greedy; 1 if left out."""
    top_p: Probability | None = None
    """Sample from the likeliest tokens that together have this probability."""
    top_k: Annotated[int, Field(ge=-1, lt=MOST)] | None = None
    """Sample from so many of the likeliest tokens; 0 and -1 from all."""
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    """How many answers to each prompt."""
    stop: Stop | Stops | None = None
    """The answer ends before any of these texts."""
    sampling_seed: Seed | None = None
    """Makes sampling repeatable."""
    ignore_eos: bool | None = None
    """Go on after the end-of-text token."""


class GenerateBody(_Asked):
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


class HookBody(_Asked):
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
