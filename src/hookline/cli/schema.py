"""Print the JSON Schema of a file that hookline reads, for editors: ``hookline schema``.

`main` calls `schema`. A schema says which keys there are and what each may be, from `Run`, `ServerFile` and `HookSpec`.
Whether keys go together, and whether there are such modules and hooks, ``hookline check`` tells.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from hookline.cli.main import DONE
from hookline.cli.screen import tell
from hookline.runs.flags import Show, parse

__all__ = ["SchemaOptions", "schema", "schema_of"]

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


@dataclass
class SchemaOptions:
    """Print the JSON schema of a file that hookline reads, for editors.

    Examples:
      hookline schema > run.schema.json
      hookline schema server > server.schema.json     # in server.json: "$schema": "server.schema.json"
    """

    file: Annotated[Literal["run", "hooks", "server"], Show("[run|hooks|server]", is_word=True)] = "run"
    """A run file, a list of hooks on modules, or the settings of a server (enable_hooks, hooks, forward_hooks)."""


def schema(arguments: Sequence[str]) -> int:
    """Print the schema."""
    options = parse(SchemaOptions, arguments, "schema")
    tell(json.dumps(schema_of(options.file), indent=2))
    return DONE


def schema_of(what: str) -> dict[str, Any]:
    """Return the schema of a run file ("run"), a list of hooks on modules ("hooks") or a server's settings."""
    from pydantic import TypeAdapter

    from hookline.runs.documents import ServerFile
    from hookline.runs.run import Run
    from hookline.specs.hook_spec import HookSpec

    if what == "hooks":
        return {"$schema": _DIALECT, "title": "Hooks on modules", **TypeAdapter(list[HookSpec]).json_schema()}
    if what == "server":
        return {"$schema": _DIALECT, **ServerFile.model_json_schema()}
    found = Run.model_json_schema()
    for name, one in found["properties"].items():  # null is the same as nothing
        found["properties"][name] = {"anyOf": [one, {"type": "null"}], "description": one.get("description", "")}
    found["properties"]["$schema"] = {"type": "string", "description": "Where this schema is, for editors."}
    return {"$schema": _DIALECT, **found}
