"""``/openapi.json`` made true: what FastAPI cannot know about the routes.

Takes what FastAPI wrote, hands it back with streams, safetensors answers, the token, and without the answers that are
never given.
"""

from __future__ import annotations

from typing import Any, Final

from hookline.serve.http.access import needs_token
from hookline.serve.http.encoded_states import SAFETENSORS
from hookline.serve.http.http_settings import Settings

__all__ = ["true_openapi"]

_SAID: Final = {
    "400": "The body is not what is asked for, or cannot be done.",
    "401": "The token is missing, or another.",
    "403": "Not allowed: no token was set, or the factory or a path is not on the list.",
    "404": "There is no such model or hook.",
    "408": "The rest of the body did not come.",
    "413": "The body is too large.",
    "429": "Too many requests wait; try again after Retry-After seconds.",
    "500": "The model failed.",
    "503": "The model is being loaded, or the server stops; try again after Retry-After seconds.",
}
_STREAMING: Final = ("/v1/completions", "/generate")
_EVENT: Final = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "data": {
            "type": "string",
            "description": "JSON: a piece of the answer, or an error and then the end; `[DONE]` is the last event.",
        }
    },
}


def true_openapi(found: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """The description, put right in place."""
    found.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for name in ("HTTPValidationError", "ValidationError"):
        found["components"].get("schemas", {}).pop(name, None)
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            _put_right(operation, path, method.upper(), settings)
    return found


def _put_right(operation: dict[str, Any], path: str, method: str, settings: Settings) -> None:
    answers = operation["responses"]
    answers.pop("422", None)  # FastAPI's own; ours is 400
    needs = needs_token(settings, method, path)
    if needs:
        operation["security"] = [{"token": []}]
    else:
        answers.pop("401", None)
    for status, said in _SAID.items():
        if status in answers and path != "/health":
            answers[status]["description"] = said
    if path in _STREAMING:
        content = answers["200"]["content"]
        content["text/event-stream"] = {"itemSchema": _EVENT}
        content[SAFETENSORS] = {"schema": {"type": "string", "format": "binary"}}
