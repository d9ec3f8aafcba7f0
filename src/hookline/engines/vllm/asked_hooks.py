"""Read what the body of a request to ``vllm serve`` asks of hookline, and make the body that goes on to vLLM.

`RequestHooksMiddleware` calls it for every body. Requests come from anybody, so that all is checked here: what workers
get is written anew from what was understood, never passed on as a client wrote it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from hookline.engines.vllm.request_options import StatesPlan
from hookline.errors import OptionError
from hookline.serve.http.error_answers import Refused, refusal_from_validation, to_json
from hookline.serve.http.hook_routes import specs_of_request
from hookline.serve.http.http_settings import Settings, check_answers_wanted
from hookline.serve.http.request_bodies import HiddenStatesBody, RequestHooks, keys_at

__all__ = ["EngineRequestHooks", "EngineStatesBody", "StatesRequest", "check_asks_nothing", "read_request"]

_XARGS: Final = "vllm_xargs"
_OPTION: Final = "hookline"
"""The key of ``vllm_xargs`` and ``SamplingParams.extra_args`` that workers read."""
_TEXT: Final = f"{_XARGS}.{_OPTION}"


class EngineStatesBody(HiddenStatesBody):
    """The hidden states of this request to send back."""

    window: Annotated[list[int | None], Field(min_length=2, max_length=2)] | None = None
    """First position and the one behind the last, such as ``[-8, null]``; negative ones count from the end of the
    prompt."""
    bypass_cache: bool = False
    """Compute the whole prompt: what comes from the prefix cache passes no hook, and has no states. Takes the place of
    a ``cache_salt`` in the body."""


class EngineRequestHooks(RequestHooks):
    """Hooks that live for this one request."""

    hidden_states: EngineStatesBody | None = None
    """Send these hidden states back."""


@dataclass(frozen=True)
class StatesRequest:
    """A request that gets hooks or hidden states, as it goes on to vLLM."""

    name: str
    """What vLLM is told to call it."""
    keys: tuple[str, ...]
    """The ids under which workers keep the states of each choice, in the order of choices."""
    body: bytes
    has_one_prompt: bool
    """Whether an answer of vLLM that refuses it means that nothing of it has begun."""


def read_request(
    content: bytes, *, path: str = "/v1/completions", name: str | None = None, settings: Settings | None = None
) -> StatesRequest | None:
    """Return the request that goes to vLLM instead of the body `content`; None if it asks for no hooks.

    Args:
        content: The body.
        path: Where it was sent to; vLLM's ids depend on it.
        name: The id that the client gave it. A random end makes it unique: no two requests may mix their states.
        settings: The limits and the export folder.

    Raises:
        Refused: The hooks are not valid, or ask for too much.
    """
    try:
        return _read(content, path, name, settings or Settings())
    except RecursionError:
        raise _too_deep() from None
    except OptionError as error:
        raise Refused(400, str(error), param="$.hooks") from None


def check_asks_nothing(content: bytes) -> None:
    """Raise if a body for a path that takes no hooks has options for the workers in it."""
    try:
        body = _parsed(content)
    except RecursionError:
        raise _too_deep() from None
    params = body.get("sampling_params")
    for given in (body.get(_XARGS), params.get("extra_args") if isinstance(params, dict) else None):
        if isinstance(given, dict) and _OPTION in given:
            raise Refused(400, "This path takes no hooks; send them to /v1/completions or /v1/chat/completions.")


def _read(content: bytes, path: str, name: str | None, settings: Settings) -> StatesRequest | None:
    body = _parsed(content)
    wanted = _wanted(body)
    if wanted is None or (wanted.hidden_states is None and wanted.hooks is None):
        return None
    states = wanted.hidden_states
    prompts, copies = _prompts(body, path), _copies(body)
    check_answers_wanted(settings, prompts * copies)  # a name is made for each
    unique = "-".join([*([name] if name else []), uuid.uuid4().hex])
    body.pop("hooks", None)
    asked = _for_workers(wanted, settings, prompts * copies)
    body[_XARGS] = {**(body.get(_XARGS) or {}), _OPTION: json.dumps(asked)}
    if states is not None and states.bypass_cache:
        body["cache_salt"] = unique  # blocks of another salt are never shared
    return StatesRequest(unique, tuple(_keys(path, unique, prompts, copies)), _written(body), prompts == 1)


def _parsed(content: bytes) -> dict[str, Any]:
    """Return the body; an empty one if it is no object, so that vLLM says what is wrong with it.

    Every body is parsed, as vLLM does it: escapes and UTF-16 hide a key from a search in the bytes.
    """
    try:
        body = json.loads(content)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _wanted(body: Mapping[str, Any]) -> EngineRequestHooks | None:
    """Return what is asked for in one of the two ways; None if nothing is."""
    given, xargs = body.get("hooks"), body.get(_XARGS)
    text = xargs.get(_OPTION) if isinstance(xargs, dict) else None
    if given is None and text is None:
        return None
    if not isinstance(xargs, dict | None):
        raise Refused(400, f"$.{_XARGS} is an object.", param=f"$.{_XARGS}")
    if given is not None and text is not None:
        raise Refused(400, f"Hooks come in hooks or in {_TEXT}; send one of the two.", param="$.hooks")
    return _validated("hooks", given) if text is None else _validated(_TEXT, _options(text))


def _options(text: Any) -> Any:
    """Return what a client has put into ``vllm_xargs`` itself; its values are texts there."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise Refused(400, f"{_TEXT} is no JSON: {error}.", param=f"$.{_TEXT}") from None


def _validated(place: str, given: Any) -> EngineRequestHooks:
    if isinstance(given, dict) and "key" in given:  # another request may have it, whose states it would take
        raise Refused(
            400, "A request over HTTP is named by the header X-Request-Id; leave key out.", param=f"$.{place}.key"
        )
    try:
        return EngineRequestHooks.model_validate(given)
    except ValidationError as error:
        before = place.split(".")
        found = [{**each, "loc": (*before, *each["loc"])} for each in error.errors()]
        raise refusal_from_validation(found, lambda at: keys_at(EngineRequestHooks, at[len(before) :])) from None


def _for_workers(wanted: EngineRequestHooks, settings: Settings, answers: int) -> dict[str, Any]:
    """Return the options that workers read, see `request_options`."""
    asked: dict[str, Any] = {}
    if wanted.hidden_states is not None:
        asked["hidden_states"] = wanted.hidden_states.model_dump(exclude_none=True, exclude={"bypass_cache"})
        StatesPlan.read(asked["hidden_states"])  # raises before the request runs
    if wanted.hooks is not None:
        asked |= {"hooks": specs_of_request(wanted.hooks, settings), "answers": answers}
    return asked


def _prompts(body: Mapping[str, Any], path: str) -> int:
    prompt = body.get("prompt")
    is_list = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return len(prompt) if is_list and isinstance(prompt, list) and "chat" not in path else 1


def _copies(body: Mapping[str, Any]) -> int:
    copies = body.get("n")
    if copies is None:
        return 1
    if type(copies) is not int or copies < 1:  # vLLM takes "2" and 2.0 as well, but then ids would be others
        raise Refused(400, f"$.n is a whole number from 1 on, got {str(copies)[:80]!r}.", param="$.n")
    return copies


def _keys(path: str, name: str, prompts: int, copies: int) -> list[str]:
    """Return the ids that vLLM gives to each prompt and each answer to it."""
    ids = [f"chatcmpl-{name}"] if "chat" in path else [f"cmpl-{name}-{place}" for place in range(prompts)]
    return ids if copies == 1 else [f"{copy}_{id}" for id in ids for copy in range(copies)]


def _written(body: Mapping[str, Any]) -> bytes:
    try:
        return to_json(body)
    except ValueError:
        raise Refused(400, "The body has NaN or Infinity in it, which are no JSON.") from None


def _too_deep() -> Refused:
    return Refused(400, "Lists and objects of the body lie too deep in each other.", param="$")
