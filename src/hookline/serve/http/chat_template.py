"""Write a conversation as the prompt that a model was trained on, with its tokenizer's chat template.

`Serving` calls `render_chat` for ``/v1/chat/completions``. The template is the model's; transformers runs it in Jinja's
sandbox. Imports no package that HTTP needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from hookline.serve.http.error_answers import Refused

__all__ = ["render_chat"]


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], more: Mapping[str, Any]) -> str:
    """Return the prompt of `messages`; `more` are other variables of the template. Raise a 400 if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise Refused(
            400,
            "The model's tokenizer has no chat template, so that messages mean nothing to it; send a prompt to "
            "/v1/completions, or start the server with --chat-template FILE.",
        )
    _check_variables(tokenizer, more)
    knows_developer = "developer" in str(template)
    written = [{**each, "role": _role(each["role"], knows_developer=knows_developer)} for each in messages]
    try:
        return str(tokenizer.apply_chat_template(written, tokenize=False, add_generation_prompt=True, **more))
    except Exception as error:  # the template is a program, which may raise anything on messages it does not like
        said = str(error) or type(error).__name__
        raise Refused(400, f"The model's chat template refuses these messages: {said}", param="$.messages") from error


def _role(role: str, *, knows_developer: bool) -> str:
    return "system" if role == "developer" and not knows_developer else role


def _check_variables(tokenizer: Any, more: Mapping[str, Any]) -> None:
    """Raise for a variable that would replace the template, the messages or the form of the result."""
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    wrong = sorted(taken & more.keys())
    if wrong:
        raise Refused(
            400,
            f"chat_template_kwargs may not set {wrong[0]!r}, which the server sets.",
            param="$.chat_template_kwargs",
        )
