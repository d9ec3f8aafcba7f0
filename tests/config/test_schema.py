"""The JSON Schemas: right files pass a real validator, wrong ones do not, and every key is in them."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
import yaml

from hookline.cli.commands import schema_of
from hookline.errors import ConfigError
from hookline.runs.documents import CoreLoader, read_document, server_settings
from hookline.runs.read import read_file
from hookline.runs.run import Run
from hookline.specs.hook_spec import HookSpec

ROOT = Path(__file__).parents[2]
SPEC = {"name": "a", "target_modules": ["outer.0"], "hook_factory": "hookline.factories:nan_alarm", "config": {}}


def validator(what):
    return jsonschema.Draft202012Validator(schema_of(what))


def test_every_key_is_there_with_what_it_is():
    """Of the run file, and of a spec."""
    assert set(schema_of("run")["properties"]) == {*Run.model_fields, "$schema"}
    assert all(entry["description"] for entry in schema_of("run")["properties"].values())
    spec = schema_of("hooks")["$defs"]["HookSpec"]["properties"]
    assert list(spec) == [field.name for field in fields(HookSpec)]
    assert all(entry["description"] for entry in spec.values())


def test_the_run_files_of_the_pages_pass():
    """Those that users copy."""
    found = []
    for page in ("command_line.md", "specs.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        found += [
            yaml.load(block, CoreLoader)
            for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        ]
    runs = [values for values in found if "experiment" in values]
    assert runs
    for values in runs:
        validator("run").validate(values)


RIGHT = [
    ("hooks", [SPEC, {**SPEC, "on": "function_forward", "every": 3, "exclude": None}]),
    ("server", {"enable_hooks": True, "hooks": [SPEC], "forward_hooks": None, "model_path": "x", "port": 30000}),
    ("server", {"hooks": None}),
    ("run", {"experiment": "x", "hooks": ["norms"], "$schema": "run.schema.json"}),
    ("run", {"experiment": "x", "enable_hooks": True, "hooks": [SPEC], "seed": 3}),
    ("run", {"hooks": {"names": ["hessian"], "schedules": {"hessian": {"stride": 50}}}, "specs": [SPEC]}),
    ("run", {"save_checkpoints": 3}),
]
WRONG = [
    ("hooks", SPEC),
    ("hooks", [{**SPEC, "nme": "x"}]),
    ("hooks", [{**SPEC, "on": "sideways"}]),
    ("hooks", [{**SPEC, "every": 0}]),
    ("server", {"hooks": SPEC}),
    ("server", {"enable_hooks": "true"}),
    ("server", {"forward_hooks": [{**SPEC, "config": 3}]}),
    ("run", {"hoks": {}}),
    ("run", {"hooks": {"schedules": {"a": {"stride": "x"}}}}),
    ("run", {"specs": [{**SPEC, "on_error": "ignore"}]}),
]


def read(what, values, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(values if what != "hooks" else {"hooks": values}))
    document = read_document(tmp_path / "a.json")
    return read_file(document.path) if what == "run" else server_settings(document)


@pytest.mark.parametrize(("what", "values"), RIGHT)
def test_what_it_takes_hookline_takes(what, values, tmp_path):
    """Unknown keys of a server among it."""
    validator(what).validate(values)
    read(what, values, tmp_path)


@pytest.mark.parametrize(("what", "values"), WRONG)
def test_what_it_refuses_hookline_refuses(what, values, tmp_path):
    """An editor underlines what a run would trip over."""
    assert not validator(what).is_valid(values)
    with pytest.raises(ConfigError):
        read(what, values, tmp_path)


def test_an_editor_asks_for_what_a_spec_needs():
    """Though a spec without it is only passed over with a line."""
    assert not validator("hooks").is_valid([{"name": "a"}])
