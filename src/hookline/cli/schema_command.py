"""Print the JSON Schema of a file that hookline reads, or of what a command prints: ``hookline schema``.

`main` calls `schema`, which prints what `hookline.config.json_schema` makes, or `hookline.cli.json_output`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional

from hookline.cli.json_output import output_schema
from hookline.cli.main import DONE
from hookline.cli.parse import parse
from hookline.cli.screen import tell
from hookline.config.run_options import flag

__all__ = ["SchemaOptions", "schema"]

Output = Literal["audit", "check", "compare", "doctor", "dry-run", "find", "hooks", "run"]


@dataclass
class SchemaOptions:
    """Print the JSON schema of a file that hookline reads, for editors; or of what a command prints, for programs.

    Examples:
      hookline schema > run.schema.json
      hookline schema --output find
      hookline schema server > server.schema.json     # in server.json: "$schema": "server.schema.json"
    """

    file: Annotated[Positional[Literal["run", "hooks", "server"]], flag("[run|hooks|server]")] = "run"
    """A run file, a list of hooks on modules, or the settings of a server (enable_hooks, hooks, forward_hooks)."""
    output: Annotated[Output | None, flag("COMMAND")] = None
    """Print the schema of what this command prints with --json, instead; dry-run: that of hookline run --dry-run."""


def schema(arguments: Sequence[str]) -> int:
    """Print the schema."""
    options = parse(SchemaOptions, arguments, "schema")
    from hookline.config.json_schema import schema_of

    found = schema_of(options.file) if options.output is None else output_schema(options.output)
    tell(json.dumps(found, indent=2))
    return DONE
