"""``hookline schema [run|hooks|server]``: the JSON schema of a file that hookline reads.

Takes which file it is, prints the schema; editors complete and check files by it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from hookline.cli.error_messages import DONE
from hookline.cli.parse import parse
from hookline.cli.printing import tell

__all__ = ["SchemaOptions", "command"]


@dataclass
class SchemaOptions:
    """Print the JSON schema of a file that hookline reads, for editors.

    Examples:
      hookline schema > run.schema.json
      hookline schema server > server.schema.json     # in server.json: "$schema": "server.schema.json"
    """

    file: Annotated[
        Positional[Literal["run", "hooks", "server"]], arg(metavar="[run|hooks|server]", help_behavior_hint="")
    ] = "run"
    """A run file, a list of hooks on modules, or the settings of a server (enable_hooks, hooks, forward_hooks)."""


def command(arguments: Sequence[str]) -> int:
    """Print it."""
    options = parse(SchemaOptions, arguments, "schema")
    from hookline.config.json_schema import schema_of

    tell(json.dumps(schema_of(options.file), indent=2))
    return DONE
