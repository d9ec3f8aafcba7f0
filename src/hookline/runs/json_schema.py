"""Make the JSON Schemas of the files that hookline reads, for editors and for ``/openapi.json``.

``hookline schema`` calls `schema_of`. A schema says which keys there are and what each may be, from `Run` and from
`HookSpec`. Whether keys go together (``sees: raw`` without ``observe``), and whether there are such modules and
hooks, ``hookline check`` tells.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import TypeAdapter

from hookline.runs.run import Run
from hookline.specs.hook_spec import HookSpec

__all__ = ["SCHEMAS", "schema_of", "spec_schema"]

SCHEMAS: Final = ("run", "hooks", "server")
"""Of a run file, of a list of hooks on modules, of the settings of a server."""
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_LIST: Final = {"type": "array", "items": {"$ref": "#/$defs/SpecEntry"}}


def schema_of(what: str) -> dict[str, Any]:
    """Return the schema of one of `SCHEMAS`."""
    if what == "run":
        return _run_schema()
    if what == "hooks":
        return {"$schema": _DIALECT, "title": "Hooks on modules", "type": "array", "items": spec_schema()}
    listed = {"anyOf": [_LIST, {"type": "null"}]}
    return {
        "$schema": _DIALECT,
        "title": "Settings of a server",
        "type": "object",
        "properties": {
            "enable_hooks": {"type": ["boolean", "null"], "description": "Whether hooks are attached; default false."},
            "hooks": listed | {"description": "Hooks on modules, attached if enable_hooks is true."},
            "forward_hooks": listed | {"description": "The same, attached in any case."},
        },
        "$defs": {"SpecEntry": spec_schema()},
    }


def spec_schema() -> dict[str, Any]:
    """Return the schema of one hook on modules."""
    return TypeAdapter(HookSpec).json_schema() | {
        "title": "SpecEntry",
        "description": "A hook on modules, as data; what `hookline.register_hooks` takes.",
    }


def _run_schema() -> dict[str, Any]:
    found = Run.model_json_schema()
    found["$defs"]["SpecEntry"] = spec_schema()
    properties = found["properties"]
    properties["$schema"] = {"type": "string", "description": "Where this schema is, for editors."}
    properties["specs"] = _LIST | {"description": "Hooks on modules."}
    properties["hooks"] = {
        "anyOf": [{"$ref": "#/$defs/Hooks"}, {"type": "array", "items": {"type": "string"}}, _LIST],
        "description": "Lifecycle hooks, or a list: of their names, or of hooks on modules.",
    }
    for name, one in properties.items():  # null is the same as nothing
        if name != "$schema":
            properties[name] = {"anyOf": [one, {"type": "null"}], "description": one.get("description", "")}
    return {"$schema": _DIALECT, "title": "A run of hookline", **{k: v for k, v in found.items() if k != "title"}}
