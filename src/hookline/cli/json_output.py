"""Print JSON for programs, and publish its schema: what ``--json`` of a command gives.

The commands call `tell_json`; ``hookline schema --output COMMAND`` prints what `output_schema` returns. A schema holds
for every version that has the same ``"version"``: keys may be added, none is taken away.
"""

from __future__ import annotations

import json
from typing import Any, Final

from hookline.cli.screen import tell

__all__ = ["OUTPUTS", "output_schema", "tell_json"]

VERSION: Final = 1
"""Goes up when a key is renamed, taken away, or means something else."""

Schema = dict[str, Any]


def tell_json(command: str, values: dict[str, Any]) -> None:
    """Print ``values`` as the JSON of ``command``, with format and version before them."""
    found = {"format": f"hookline.{command}", "version": VERSION, **values}
    tell(json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False))


def output_schema(command: str) -> Schema:
    """Return the JSON Schema of what ``hookline COMMAND --json`` prints."""
    named: dict[str, Schema] = {"format": {"const": f"hookline.{command}"}, "version": {"const": VERSION}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"hookline {_SAID.get(command, command)} --json",
        **_record(**named, **_FIELDS[command]),
    }


def _record(**properties: Schema) -> Schema:
    """Return the schema of an object that has all of ``properties``; others may come later."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT: Final[Schema] = {"type": "string"}
_WHOLE: Final[Schema] = {"type": "integer"}
_TRUTH: Final[Schema] = {"type": "boolean"}
_NUMBER: Final[Schema] = {"type": "number"}
_FIGURE: Final[Schema] = {"type": ["number", "string", "null"]}
"""A number; as text where it is NaN or infinite, which JSON does not have."""
_TEXTS: Final = _list(_TEXT)

_HOOK: Final = {"site": _TEXT, "kind": _TEXT, "name": _TEXT, "owner": _TEXT, "where": _TEXT, "has_handle": _TRUTH}
_DIFFERENCE: Final = _record(step=_WHOLE, names=_TEXTS, is_end=_TRUTH)
_PLACE: Final = {"site": _TEXT, "kind": _TEXT, "leaf": _TEXT, "step": _WHOLE, "call": _WHOLE, "rank": _WHOLE}
_COMPARED: Final = _record(
    **_PLACE, shape=_list(_WHOLE), dtypes=_TEXTS, max_abs=_FIGURE, mean_abs=_FIGURE, rel_l2=_FIGURE,
    floor=_FIGURE, verdict=_TEXT, same=_TRUTH, follows=_TEXT, sure=_TRUTH,
)  # fmt: skip

_FIELDS: Final[dict[str, dict[str, Schema]]] = {
    "audit": {
        "ok": _TRUTH,
        "verdict": {"enum": ["same", "changed", "not repeatable", "cannot be told"]},
        "hooks": _TEXTS,
        "steps": _WHOLE,
        "trainings": _WHOLE,
        "difference": _or_null(_DIFFERENCE),
        "culprits": _list(_record(hooks=_TEXTS, difference=_DIFFERENCE)),
        "not_repeatable": _or_null(_DIFFERENCE),
        "left_behind": _or_null(_DIFFERENCE),
        "end_differs": _TEXTS,
        "silent": _TEXTS,
        "leftovers": _TEXTS,
        "notes": _TEXTS,
    },
    "check": {
        "file": _TEXT,
        "hooks": _list(_record(name=_TEXT, on=_TEXT, target_modules=_TEXTS, matches=_TEXT)),
        "trackers": _list(_record(name=_TEXT, counts=_TEXT, target_modules=_TEXTS, matches=_TEXT)),
        "warnings": _TEXTS,
    },
    "compare": {
        "a": _TEXT,
        "b": _TEXT,
        "ok": _TRUTH,
        "estimate": _TRUTH,
        "limit": _record(
            atol=_FIGURE,
            rtol=_FIGURE,
            thresholds={"type": "object"},
            rounding=_NUMBER,
            noise={"enum": ["modelled", "measured"]},
        ),
        "first": _or_null(_COMPARED),
        "blamed": _list(_record(module=_TEXT, outside=_TEXT, why=_TEXT, inputs=_TRUTH)),
        "only_a": _TEXTS,
        "only_b": _TEXTS,
        "not_compared": _list(_record(**_PLACE, why=_TEXT)),
        "notes": _TEXTS,
        "left_out": _TEXTS,
        "missing": _TEXTS,
        "problems": _TEXTS,
        "values": _list(_COMPARED),
    },
    "doctor": {
        "model": _TEXT,
        "hooks": _list(_record(**_HOOK)),
        "silent": _list(_record(name=_TEXT, type=_TEXT, reason=_TEXT, is_certain=_TRUTH)),
        "leaks": _list(_record(**_HOOK)),
        "duplicates": _list(_record(**_HOOK, count=_WHOLE)),
        "unheard": _list(_record(**_HOOK, reason=_TEXT)),
        "notes": _TEXTS,
        "cost_us": _NUMBER,
        "forward_us": _or_null(_NUMBER),
        "error": _TEXT,
        "problems": _TEXTS,
    },
    "find": {"modules": _list(_record(name=_TEXT, type=_TEXT, parameters=_WHOLE, hooks=_TEXTS))},
    "hooks": {
        "hooks": _list(
            _record(
                name=_TEXT,
                kind={"enum": ["observer", "intervention"]},
                description=_TEXT,
                debug=_TRUTH,
                hook_points=_TEXTS,
                needs=_TEXTS,
                options=_list(_record(name=_TEXT, type=_TEXT, default=_TEXT)),
                metrics=_list(_record(name=_TEXT, description=_TEXT, formula=_TEXT, sign_info=_TEXT)),
            )
        )
    },
}

_FIELDS["dry-run"] = {
    "experiment": _TEXT,
    "length": _WHOLE,
    "unit": {"enum": ["epochs", "steps"]},
    "strategies": _TEXTS,
    "model": _record(type=_TEXT, parameters=_WHOLE, dtype=_TEXT, device=_TEXT),
    "config": {"type": "object"},
    "hooks": _list(_record(point=_TEXT, order=_WHOLE, hook=_TEXT, does=_TEXT, when=_TEXT, needs=_TEXT)),
    "left_out": _list(_record(hook=_TEXT, why=_TEXT)),
    "sites": _list(_record(hook=_TEXT, kind=_TEXT, sites=_TEXTS)),
    "memory": _list(_record(what=_TEXT, hooks=_TEXTS, bytes=_WHOLE)),
    "files": _list(_record(strategy=_TEXT, folder=_TEXT, files=_TEXTS)),
}
_FIELDS["run"] = {
    "experiment": _TEXT,
    "runs": _list(
        _record(
            strategy=_TEXT,
            status={"enum": ["finished", "stopped"]},
            folder=_TEXT,
            files={"type": "object", "additionalProperties": _TEXT},
            steps=_WHOLE,
            seconds=_NUMBER,
            loss=_FIGURE,
            metrics={"type": "object"},
            profile=_list(_record(section=_TEXT, count=_WHOLE, total_ms=_NUMBER, mean_ms=_NUMBER)),
        )
    ),
    "comparison": _or_null(_TEXT),
}

_SAID: Final = {"dry-run": "run --dry-run"}
"""How an output is asked for, where that is not by its name."""
OUTPUTS: Final = tuple(_FIELDS)
"""What has ``--json``: the commands, and the dry run."""
