"""JSON Schemas of the files that hookline reads, for editors.

Asked by ``hookline schema``. They say which keys there are and what each may be; whether keys go together (``sees:
raw`` without ``observe``), and whether there are such modules and hooks, ``hookline check`` tells.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from hookline.config.run_file import RunFile
from hookline.sites.kinds import FUNCTION, MODULE, Kind, SiteType

__all__ = ["SCHEMAS", "SpecEntry", "schema_of"]

SCHEMAS: Final = ("run", "hooks", "server")
"""Of a run file, of a list of hooks on modules, of the settings of a server."""
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


class SpecEntry(BaseModel):
    """A hook on modules, as data; what `hookline.register_hooks` takes."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = Field(default="", description="What messages call it.")
    target_modules: list[str] | str = Field(
        description="Patterns of module names, of which one has to match: * crosses dots, # is one number."
    )
    hook_factory: str = Field(description='What makes the hook: "package.module:function".')
    config: dict[str, Any] | None = Field(default=None, description="What the factory is called with.")
    on: str | None = Field(default="forward", description="The kind of hook.")
    observe: bool | None = Field(default=False, description="What it returns is ignored.")
    every: int | None = Field(default=None, ge=1, description="Call it in every so many forwards of the model.")
    sees: Literal["edited", "raw"] | None = Field(default=None, description="What an observer sees.")
    exclude: list[str] | str | None = Field(default=None, description="Patterns of modules to leave out.")
    enabled: bool | None = Field(default=True, description="Whether it is attached at all.")
    on_error: Literal["raise", "warn", "disable"] | None = Field(
        default="raise", description="What happens when it raises."
    )


def schema_of(what: str) -> dict[str, Any]:
    """One of `SCHEMAS`."""
    if what == "run":
        return _of_run()
    entry = _of_spec()
    specs = {"type": "array", "items": entry}
    if what == "hooks":
        return {"$schema": _DIALECT, "title": "Hooks on modules", **specs}
    listed = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/SpecEntry"}}, {"type": "null"}]}
    return {
        "$schema": _DIALECT,
        "title": "Settings of a server",
        "type": "object",
        "properties": {
            "enable_hooks": {"type": ["boolean", "null"], "description": "Whether hooks are attached; default false."},
            "hooks": listed | {"description": "Hooks on modules, attached if enable_hooks is true."},
            "forward_hooks": listed | {"description": "The same, attached in any case."},
        },
        "$defs": {"SpecEntry": entry},
    }


def _of_run() -> dict[str, Any]:
    found = RunFile.model_json_schema()
    found["$defs"]["SpecEntry"] = _of_spec()
    entry = {"type": "array", "items": {"$ref": "#/$defs/SpecEntry"}}
    properties = found["properties"]
    properties["$schema"] = {"type": "string", "description": "Where this schema is, for editors."}
    properties["specs"] = entry | {"description": "Hooks on modules."}
    properties["hooks"] = {
        "anyOf": [{"$ref": "#/$defs/HookChoice"}, {"type": "array", "items": {"type": "string"}}, entry],
        "description": "Hooks over time, or a list: of their names, or of hooks on modules.",
    }
    for name, one in properties.items():  # null is the same as nothing
        if name != "$schema":
            properties[name] = {"anyOf": [one, {"type": "null"}], "description": one.get("description", "")}
    return {"$schema": _DIALECT, "title": "A run of hookline", **{k: v for k, v in found.items() if k != "title"}}


def _of_spec() -> dict[str, Any]:
    found = SpecEntry.model_json_schema()
    kinds = [*_names(MODULE), *(f"function_{name}" for name in _names(FUNCTION))]
    found["properties"]["on"] = {"enum": [*kinds, None], "default": "forward", "description": "The kind of hook."}
    return found


def _names(subject: SiteType) -> list[str]:
    """The kinds that something can have, and their other names."""
    return [str(kind) for kind in Kind if kind in subject.args] + list(subject.aliases)
