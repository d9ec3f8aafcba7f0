"""Describe the routes: correct ``/openapi.json``, and render it as the page ``/docs``.

The app calls both. FastAPI does not know of streams, safetensors answers and the token, and lists answers that are
never given. Its own page loads a program from another site and is blank without internet; this one is plain HTML.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from hookline.serve.http.generation_routes import SAFETENSORS
from hookline.serve.http.http_settings import Settings, needs_token

__all__ = ["correct_openapi", "render_docs"]

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
_STREAMING: Final = ("/v1/completions", "/v1/chat/completions", "/generate")
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


def correct_openapi(found: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Correct the description in place, and return it."""
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


_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
section { border: 1px solid var(--line); border-radius: .5rem; margin: 1rem 0; padding: .2rem 1rem 1rem; }
section h3 { font-family: ui-monospace, monospace; margin: .6rem 0 0; overflow-wrap: anywhere; }
.method { display: inline-block; min-width: 4.2rem; }
.GET { color: #16833c; } .POST { color: #1d5fd1; } .DELETE { color: #c02626; }
@media (prefers-color-scheme: dark) { .GET { color: #5fd38a; } .POST { color: #7fb0ff; } .DELETE { color: #ff8f8f; } }
.lock { font-size: .85rem; border: 1px solid var(--line); border-radius: 1rem; padding: .1rem .6rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-top: 1px solid var(--line); padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top; }
td:nth-child(2) { overflow-wrap: anywhere; max-width: 18rem; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
pre { background: var(--soft); border-radius: .4rem; overflow-x: auto; padding: .6rem .8rem; }
@media (max-width: 40rem) {
  td { border: 0; display: block; padding: 0; }
  tr { border-top: 1px solid var(--line); display: block; padding: .3rem 0; }
}
summary { cursor: pointer; margin-top: .8rem; }
"""

_EXAMPLES: Final[dict[tuple[str, str], str]] = {
    ("POST", "/v1/completions"): json.dumps({"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}),
    ("POST", "/v1/chat/completions"): json.dumps(
        {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 16, "temperature": 0}
    ),
    ("POST", "/generate"): json.dumps(
        {
            "text": "Once upon a time",
            "sampling_params": {"max_new_tokens": 4, "temperature": 0},
            "hooks": {"hidden_states": {"layers": ["model.layers.#"], "positions": "last"}},
        }
    ),
    ("POST", "/hooks"): json.dumps(
        {
            "name": "stats",
            "target_modules": ["model.layers.#"],
            "hook_factory": "hookline.factories:activation_stats",
        }
    ),
}


def render_docs(openapi: Mapping[str, Any], url: str = "http://127.0.0.1:8000") -> str:
    """Return the page; its examples ask the server at `url`.

    Recipe: ``HTMLResponse(render_docs(app.openapi(), server.url))``.
    """
    about = "".join(f"<p>{_marked(part)}</p>" for part in openapi["info"].get("description", "").split("\n\n"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(openapi['info']['title'])}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(openapi['info']['title'])} {escape(openapi['info']['version'])}</h1>{about}"
        '<p>For programs: <a href="/openapi.json">/openapi.json</a>.</p>'
        f"{''.join(_groups(openapi, url))}</body></html>"
    )


def _groups(openapi: Mapping[str, Any], url: str) -> Iterator[str]:
    tags: dict[str, list[str]] = {}
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            tags.setdefault(operation["tags"][0], []).append(_route(openapi, url, path, method.upper(), operation))
    for tag, routes in tags.items():
        yield f"<h2>{escape(tag.capitalize())}</h2>{''.join(routes)}"


def _route(openapi: Mapping[str, Any], url: str, path: str, method: str, operation: Mapping[str, Any]) -> str:
    lock = '<p><span class="lock">needs the bearer token</span></p>' if "security" in operation else ""
    parts = [
        f'<section id="{escape(operation["operationId"])}"><h3><span class="method {method}">{method}</span> '
        f"{escape(path)}</h3>{lock}<p>{_marked(operation.get('description', ''))}</p>",
        f"<pre>{escape(_curl(url + path, path, method, operation))}</pre>",
    ]
    body = operation.get("requestBody")
    if body:
        schema = body["content"]["application/json"]["schema"]
        parts.append(_details("Body", _table(openapi, schema), is_open=True))
    parts.append(_details("Answers", _answers(openapi, operation["responses"])))
    return "".join(parts) + "</section>"


def _curl(url: str, path: str, method: str, operation: Mapping[str, Any]) -> str:
    line = "curl" if method == "GET" else f"curl -X {method}"
    if "security" in operation:
        line += ' -H "Authorization: Bearer $TOKEN"'
    example = _EXAMPLES.get((method, path))
    if example is None:
        return f"{line} {url.replace('{id}', 'h1')}"
    return f"{line} {url} -H 'Content-Type: application/json' \\\n  -d '{example}'"


def _answers(openapi: Mapping[str, Any], responses: Mapping[str, Any]) -> str:
    rows = []
    for status, answer in responses.items():
        kinds = ", ".join(f"<code>{escape(kind)}</code>" for kind in answer.get("content", {}))
        rows.append(f"<tr><td>{escape(status)}</td><td>{kinds}</td><td>{escape(answer['description'])}</td></tr>")
    success = responses.get("200") or responses.get("201") or {}
    schema = success.get("content", {}).get("application/json", {}).get("schema")
    table = f"<table>{''.join(rows)}</table>"
    return table if schema is None else table + _table(openapi, schema)


def _table(openapi: Mapping[str, Any], schema: Mapping[str, Any], depth: int = 0) -> str:
    """Return a table of the keys of an object, and below it those of the objects in it."""
    found = _followed(openapi, schema)
    rows, below = [], []
    for name, field in found.get("properties", {}).items():
        must = " (required)" if name in found.get("required", ()) else ""
        rows.append(
            f"<tr><td><code>{escape(name)}</code>{must}</td><td>{escape(_kind(openapi, field))}</td>"
            f"<td>{_marked(field.get('description', ''))}</td></tr>"
        )
        inner = _object_in(openapi, field)
        if inner is not None and depth < 3:
            below.append(_details(f"{name}: its keys", _table(openapi, inner, depth + 1)))
    return f"<table>{''.join(rows)}</table>{''.join(below)}" if rows else ""


def _followed(openapi: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that a reference leads to; of several, the first that is an object."""
    if "$ref" in schema:
        found: Mapping[str, Any] = openapi["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return found
    for each in schema.get("anyOf", ()):
        if "$ref" in each:
            return _followed(openapi, each)
    return schema


def _object_in(openapi: Mapping[str, Any], field: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for each in (field, *field.get("anyOf", ())):
        for inner in (each, each.get("items"), each.get("additionalProperties")):
            if isinstance(inner, Mapping) and "$ref" in inner:
                return inner
    return None


def _kind(openapi: Mapping[str, Any], field: Mapping[str, Any]) -> str:
    """Return the type of a field in a few words."""
    if "anyOf" in field:
        kinds = [_kind(openapi, each) for each in field["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in field:
        return "object"
    if "const" in field:
        return json.dumps(field["const"])
    if "enum" in field:
        return " or ".join(json.dumps(each) for each in field["enum"])
    if field.get("type") == "array":
        inner = _kind(openapi, field.get("items", {}))
        return f"list of {inner.replace('list of', 'lists of') if 'list of' in inner else f'{inner}s'}"
    return str(field.get("type", "anything"))


def _details(title: str, content: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>{content}</details>"


def _marked(text: str) -> str:
    """Return HTML of `text`, with its code marked as code."""
    parts = escape(text, quote=False).replace("``", "`").split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))
