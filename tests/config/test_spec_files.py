"""Hooks on modules in files: what a list and the settings of a server may say, and how they say no."""

from __future__ import annotations

import json

import pytest

from hookline.errors import ConfigError
from hookline.runs.documents import is_server_file, placed_specs, read_document, server_settings

SPEC = {"name": "a", "target_modules": ["x"], "hook_factory": "m:f"}


def read(tmp_path, text, name="server.json"):
    (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return read_document(tmp_path / name)


def read_specs(document):
    return [document.at(place) for place in placed_specs(document, is_server=True)]


def test_the_settings_of_a_server_are_kept_whole(tmp_path):
    """What is not about hooks is for the server."""
    text = {"model_path": "m", "port": 3, "enable_hooks": True, "hooks": [SPEC]}
    assert server_settings(read(tmp_path, text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ({"hooks": {"name": "x"}}, "at $.hooks: expected a valid list"),
        ({"forward_hooks": "x"}, "at $.forward_hooks: expected a valid list"),
        ({"enable_hooks": "false"}, "at $.enable_hooks: expected a valid boolean"),
        ({"hooks": ["x"]}, "at $.hooks[0]: A hook spec is an object with target_modules and hook_factory, got 'x'."),
        ({"hooks": [{"name": 3}]}, "at $.hooks[0].name: expected a valid string, got 3."),
        ({"hooks": [{"config": [1]}]}, "at $.hooks[0].config: expected an object, got [1]."),
        ({"hooks": [{"hook_factry": "m:f"}]}, "nothing is called 'hook_factry' here. Did you mean 'hook_factory'?"),
        ({"hooks": [{"every": 2, "on": "state_dict_pre"}]}, "at $.hooks[0]: every counts forwards of the model"),
    ],
)
def test_what_cannot_be_is_told(tmp_path, text, said):
    """With the path to it."""
    with pytest.raises(ConfigError) as caught:
        server_settings(read(tmp_path, text))
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'server.json'}, line 1, ")


@pytest.mark.parametrize(("text", "said"), [("", "is empty"), ("null", "is empty"), ("[]", "a list"), ('"x"', "text")])
def test_settings_are_an_object(tmp_path, text, said):
    """Neither nothing nor a list."""
    with pytest.raises(ConfigError, match=rf"server\.json (holds )?{said}"):
        server_settings(read(tmp_path, text))


@pytest.mark.parametrize("text", ["{}", '{"hooks": null}', '{"hooks": []}', '{"enable_hooks": null, "hooks": []}'])
def test_no_hooks_are_no_mistake(tmp_path, text):
    """Null and an empty list are none."""
    assert not server_settings(read(tmp_path, text)).get("hooks")


def test_all_that_a_spec_may_say_is_taken(tmp_path):
    """Null is left out by whoever makes the spec."""
    whole = SPEC | {"name": None, "config": None, "on": "backward", "observe": True, "every": 3}
    whole |= {"exclude": "x.*", "enabled": False, "on_error": "disable", "target_modules": "x"}
    assert read_specs(read(tmp_path, [whole])) == [whole]


def test_which_file_it_is_can_be_told():
    """A run file says what to run; a server has hooks on modules."""
    for values in ({"hooks": [SPEC]}, {"hooks": []}, {"enable_hooks": True}, {"forward_hooks": None, "port": 1}):
        assert is_server_file(values), values
    for values in (
        {},
        [],
        None,
        {"hooks": ["norms"]},
        {"hooks": {"names": []}},
        {"experiment": "x", "enable_hooks": True, "hooks": [SPEC]},
        {"sinks": {}, "hooks": [SPEC]},
    ):
        assert not is_server_file(values), values


def test_forward_hooks_count_whatever_the_switch_says(tmp_path):
    """As in the newer spelling, which has none."""
    text = {"enable_hooks": False, "hooks": [SPEC], "forward_hooks": [SPEC | {"name": "b"}]}
    assert [spec["name"] for spec in read_specs(read(tmp_path, text))] == ["b"]
    text["enable_hooks"] = True
    assert [spec["name"] for spec in read_specs(read(tmp_path, text))] == ["a", "b"]
