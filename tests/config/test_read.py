"""Files of settings, read: values that mean what they look like, and the line of each mistake."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from hookline.errors import ConfigError
from hookline.runs.documents import CoreLoader, read_document


def load(text):
    return yaml.load(text, CoreLoader)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("-.5", -0.5),
        (".inf", math.inf),
        ("12", 12),
        ("0x1F", 31),
        ("0o17", 15),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("on", "on"),
        ("no", "no"),
        ("true", True),
        ("null", None),
        ("2024-01-02", "2024-01-02"),
        ("cuda:1", "cuda:1"),
        ("'1'", "1"),
        ("0b11", "0b11"),
    ],
)
def test_a_scalar_means_what_it_looks_like(text, value):
    """The core schema of YAML 1.2, not the surprises of 1.1."""
    assert load(f"key: {text}") == {"key": value}
    assert type(load(f"key: {text}")["key"]) is type(value)


def test_nan_is_a_number_and_an_empty_value_is_none():
    """Neither is text."""
    found = load("a: .nan\nb:\n")
    assert math.isnan(found["a"])
    assert found["b"] is None


def test_yaml_names_no_python_object(tmp_path):
    """A tag that would make an object is an error, and nothing is made."""
    file = tmp_path / "run.yaml"
    file.write_text(f"a: !!python/object/apply:pathlib.Path.touch ['{tmp_path}/made']\n")
    with pytest.raises(ConfigError, match=r"run\.yaml, line 1: this is not YAML: could not determine a constructor"):
        read_document(file)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
def test_windows_files_are_read(tmp_path, name):
    """A byte order mark, and two characters at the end of each line."""
    text = {"a.json": '{\n"a": 1,\n\t"b": [\n2]}\n', "a.yaml": "# c\na: 1\nb:\n- 2\n"}
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text[name].replace("\n", "\r\n").encode())
    document = read_document(tmp_path / name)
    assert document.values == {"a": 1, "b": [2]}


def test_what_is_written_in_three_languages_is_told_by_the_same_path(tmp_path):
    texts = {
        "a.json": '{"hooks": [\n{"name": "a"},\n{"name": "b",\n"target_modules": 3}]}',
        "a.yaml": "hooks:\n- name: a\n- name: b\n  target_modules: 3\n",
        "a.toml": "[[hooks]]\n[[hooks]]\nname = 'b'\ntarget_modules = 3\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        place = read_document(tmp_path / name).place(("hooks", 1, "target_modules"))
        line = {"a.json": ", line 4", "a.yaml": ", line 4", "a.toml": ""}[name]
        assert place == f"{tmp_path / name}{line}, at $.hooks[1].target_modules"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "a: 1\n b: 2\n", r"a\.yaml, line 2: this is not YAML"),
        ("a.yaml", "a: 1\na: 2\n", r"a\.yaml, line 2: this is not YAML: the key 'a' is there twice\."),
        ("a.json", '{"a": 1,\n "b" 2}', r"a\.json, line 2: this is not JSON: Expecting ':' delimiter\."),
        ("a.json", '{"a": 1, "a": 2}', r"this is not JSON: the key 'a' is there twice\."),
        ("a.toml", "a = 1\nb 2\n", r"a\.toml, line 2: this is not TOML"),
        ("a.yaml", "a: &a [*a]\n", r"a\.yaml: this is not YAML: .* nested too deeply"),
        ("a.yaml", "a: 1\n\tb: 2\n", r"a\.yaml, line 2: this is not YAML: found character '\\t'"),
        ("a.yaml", "a: 1\n---\nb: 1\n", r"a\.yaml, line 2: this is not YAML"),
        ("a.yaml", "? [a]\n: 1\n", r"a\.yaml, line 1: this is not YAML: found unhashable key"),
        ("a.json", '{"a": "b\tc"}', r"a\.json, line 1: this is not JSON: Invalid control character"),
        ("a.json", '{"a": /* 1}', r"a\.json, line 1: this is not JSON"),
        ("a.json", "[" * 200_000, r"a\.json: this is not JSON: its brackets are nested too deeply\."),
        ("a.toml", "a = " + "[" * 5000, r"a\.toml: this is not TOML: its brackets are nested too deeply\."),
        ("a.toml", "a = 1\na = 2\n", r"a\.toml, line 2: this is not TOML"),
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


def test_values_of_an_alias_share_nothing(tmp_path):
    (tmp_path / "b.yaml").write_text("a: &a [x, x]\nb: [*a, *a]\n")
    document = read_document(tmp_path / "b.yaml")
    assert document.values["b"] == [["x", "x"], ["x", "x"]]
    assert document.values["b"][0] is not document.values["b"][1]


@pytest.mark.parametrize("ending", [".yaml", ".json", ".toml"])
@pytest.mark.parametrize("text", ["", " \n\n", "\ufeff"])
def test_an_empty_file_says_nothing(tmp_path, ending, text):
    (tmp_path / f"a{ending}").write_text(text, encoding="utf-8")
    assert read_document(tmp_path / f"a{ending}").values is None
