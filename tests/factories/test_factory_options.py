"""Configs of factories are checked when the hook is made, and every factory can be named by its path."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from safetensors.torch import save_file

import hookline as hl
from hookline import factories
from hookline.factories import exporting, probing, steering, streaming_stats

FACTORIES = ("activation_stats", "export", "nan_alarm", "steer", "probe")
NEEDED: dict[str, dict[str, Any]] = {
    "export": {"folder": "states"},
    "steer": {"vector": [1.0]},
    "probe": {"head": factories.ProbeHead([(torch.ones(1, 2), torch.zeros(1))])},
}


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("path", ["hookline.factories:{}", "hookline.factories.{}"])
def test_every_factory_is_found_by_its_path_and_makes_a_hook(name: str, path: str) -> None:
    """Both spellings; the hook has metrics, can be closed twice, and is called with three arguments."""
    hook = hl.specs.resolve_callable(path.format(name), ["hookline.factories"])(dict(NEEDED.get(name, {})))
    assert hook.name == hook.__name__ == name
    assert all(type(value) is float for value in hook.to_metrics().values())
    hook.close()
    hook.close()


def test_a_key_that_is_no_option_is_an_error_with_a_suggestion() -> None:
    """The message names the factory, the key, the nearest option and all there are."""
    with pytest.raises(hl.errors.OptionError, match=r"no option 'strenth'; did you mean 'strength'.*takes"):
        factories.steer({"strenth": 1})


@pytest.mark.parametrize("name", FACTORIES)
def test_paths_in_options_are_listed(name: str) -> None:
    """A server that takes specs from others confines these."""
    made = {
        "activation_stats": streaming_stats.StatsOptions, "export": exporting.ExportOptions,
        "nan_alarm": streaming_stats.AlarmOptions, "steer": steering.SteerOptions,
        "probe": probing.ProbeOptions,
    }  # fmt: skip
    paths = [key for key, kind in get_type_hints(made[name]).items() if Path in (kind, *get_args(kind))]
    assert factories.FILE_OPTIONS[name] == tuple(paths)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("activation_stats", {"stats": ["meen"]}, "did you mean 'mean'"),
        ("activation_stats", {"stats": 3}, "stats is a list of names"),
        ("activation_stats", {"log_every": 0}, "log_every is a whole number from 1 on, got 0"),
        ("activation_stats", {"log_every": True}, "log_every is a whole number"),
        ("steer", {"file": ""}, "file is a text that is not empty"),
        ("activation_stats", {"add_residual": "yes"}, "add_residual is true or false"),
        ("activation_stats", [1], "config is an object"),
        ("export", {}, "export needs a folder"),
        ("export", {"folder": "x", "positions": "first"}, "positions is one of 'all', 'last'; got 'first'"),
        ("export", {"folder": "x", "max_bytes": -1}, "max_bytes is a whole number"),
        ("steer", {}, "takes a vector, or a file that has one, got none"),
        ("steer", {"vector": [1.0], "file": "a"}, "got both"),
        ("steer", {"vector": ["a"]}, "vector is a list of numbers"),
        ("steer", {"vector": [[1.0]]}, "one row of finite real numbers"),
        ("steer", {"vector": []}, "one row of finite real numbers"),
        ("steer", {"vector": [float("nan")]}, "one row of finite real numbers"),
        ("steer", {"vector": [1.0], "strength": "big"}, "strength is a finite number"),
        ("steer", {"file": "no_such_file.safetensors"}, "cannot be read as a safetensors file"),
    ],
)
def test_values_that_mean_nothing_are_refused(name: str, config: Any, message: str) -> None:
    """When the hook is made, not when it fires."""
    with pytest.raises(hl.errors.OptionError, match=message):
        getattr(factories, name)(config)


def test_a_file_of_steer_has_to_have_the_key(tmp_path: Path) -> None:
    """The message lists what there is; with one tensor the key may be left out."""
    file = tmp_path / "vectors.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(3)}, file)
    with pytest.raises(hl.errors.OptionError, match=r"there is no 'c' of .*It has 'a', 'b'"):
        factories.steer({"file": str(file), "key": "c"})
    with pytest.raises(hl.errors.OptionError, match="no key says which"):
        factories.steer({"file": str(file)})
    save_file({"a": torch.ones(3)}, file)
    factories.steer({"file": str(file)})
    file.write_bytes(b"not one")
    with pytest.raises(hl.errors.OptionError, match="cannot be read"):
        factories.steer({"file": str(file)})
