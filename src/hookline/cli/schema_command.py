"""Print the JSON Schema of a file that hookline reads: ``hookline schema``.

`main` calls `schema`, which prints what `hookline.runs.json_schema` makes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from hookline.cli.main import DONE
from hookline.cli.screen import tell
from hookline.runs.flags import Show, parse

__all__ = ["SchemaOptions", "schema"]


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
    from hookline.runs.json_schema import schema_of

    tell(json.dumps(schema_of(options.file), indent=2))
    return DONE
