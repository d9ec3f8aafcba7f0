"""Files of settings, read: values that mean what they look like, and the line of each mistake."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hookline.config.read import read_document
from hookline.config.yaml_core import load_yaml
from hookline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        ("-.5", -0.5),
        ("5.", 5.0),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("12", 12),
        ("0x1F", 31),
        ("0o17", 15),
        ("017", 17),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("y", "y"),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("2024-01-02", "2024-01-02"),
        ("cuda:1", "cuda:1"),
        ("'1'", "1"),
        ("=", "="),
    ],
)
def test_a_scalar_means_what_it_looks_like(text, value):
    """The core schema of YAML 1.2, not the surprises of 1.1."""
    assert load_yaml(f"key: {text}") == {"key": value}
    assert type(load_yaml(f"key: {text}")["key"]) is type(value)


def test_a_key_called_on_is_a_key():
    """In YAML 1.1 it is the key True."""
    assert load_yaml("on: forward\nno: 1\n") == {"on": "forward", "no": 1}


def test_nan_is_a_number_and_an_empty_value_is_none():
    """Neither is text."""
    found = load_yaml("a: .nan\nb:\n")
    assert math.isnan(found["a"])
    assert found["b"] is None


def test_yaml_names_no_python_object(tmp_path):
    """A tag that would make an object is an error, and nothing is made."""
    file = tmp_path / "run.yaml"
    file.write_text(f"a: !!python/object/apply:pathlib.Path.touch ['{tmp_path}/made']\n")
    with pytest.raises(ConfigError, match=r"run\.yaml, line 1: this is not YAML: could not determine a constructor"):
        read_document(file)
    assert not (tmp_path / "made").exists()


JSON = """{
  // a comment, with "quotes"
  "url": "http://x//y", /* another
  one */ "list": [1, 2,], \t
  "deep": {"inner": [true, {"x": null}],},
}
"""


def test_json_may_have_comments_and_last_commas_and_lines_stay(tmp_path):
    """What looks like a comment inside a string is text."""
    file = tmp_path / "run.json"
    file.write_text(JSON)
    document = read_document(file)
    assert document.values == {
        "url": "http://x//y",
        "list": [1, 2],
        "deep": {"inner": [True, {"x": None}]},
    }
    assert document.line_of(["list", 1]) == 4
    assert document.line_of(["deep", "inner", 1, "x"]) == 5
    assert document.place(["deep", "inner", 1]) == f"{file}, line 5, at $.deep.inner[1]"


TOML = """experiment = "x"

[hooks]
names = ["a",
 "b"]
[hooks.config.hessian]
epsilon = 1e-3
[[specs]]
name = "s"
[[specs]]
name = "t"
"""


def test_toml_knows_the_lines_of_its_keys(tmp_path):
    """Tables, dotted keys, arrays of tables."""
    file = tmp_path / "run.toml"
    file.write_text(TOML)
    document = read_document(file)
    assert document.values["hooks"]["config"] == {"hessian": {"epsilon": 0.001}}
    assert document.line_of(["hooks", "names", 1]) == 4
    assert document.line_of(["hooks", "config", "hessian", "epsilon"]) == 7
    assert document.line_of(["specs", 1, "name"]) == 11


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "a: 1\n b: 2\n", r"a\.yaml, line 2: this is not YAML"),
        ("a.yaml", "a: 1\na: 2\n", r"a\.yaml, line 2: this is not YAML: the key 'a' is there twice\."),
        ("a.json", '{"a": 1,\n "b" 2}', r"a\.json, line 2: this is not JSON: Expecting ':' delimiter\."),
        ("a.json", '{"a": 1, "a": 2}', r"this is not JSON: the key 'a' is there twice\."),
        ("a.toml", "a = 1\nb 2\n", r"a\.toml, line 2: this is not TOML"),
        ("a.txt", "", r"a\.txt is no file of settings: its name ends in one of \.yaml"),
    ],
)
def test_what_cannot_be_read_says_where(tmp_path, name, text, said):
    """The file, the line, and what the parser says."""
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_document(file)


def test_a_file_that_is_not_there_is_named(tmp_path):
    """And one that is no text."""
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file"):
        read_document(tmp_path / "none.yaml")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match=r"b\.json cannot be read"):
        read_document(Path(tmp_path / "b.json"))
