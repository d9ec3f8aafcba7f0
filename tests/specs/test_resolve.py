"""Paths to code: what they may name."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
from helpers_waiting import PATIENCE

import hookline as hl
from hookline.errors import NotAllowedError
from hookline.specs.hook_spec import resolve_callable


@pytest.fixture
def project(monkeypatch):
    """A package of the user's, whose module has imported something of somebody else's."""
    import os

    package, module = types.ModuleType("my_project"), types.ModuleType("my_project.hooks")

    def factory(config):
        return None

    factory.__module__ = "my_project.hooks"
    module.factory, module.system = factory, os.system
    monkeypatch.setitem(sys.modules, "my_project", package)
    monkeypatch.setitem(sys.modules, "my_project.hooks", module)
    return module


@pytest.mark.parametrize(
    "allow",
    [
        ["my_project"],
        "my_project",
        ["my_project."],
        ["my_project.*"],
        ["my_project.hooks:factory"],
        ["os", "my_project.hooks"],
    ],
)
def test_what_is_below_an_allowed_name_resolves(project, allow):
    assert resolve_callable("my_project.hooks:factory", allow) is project.factory
    assert resolve_callable("my_project.hooks.factory", allow) is project.factory


@pytest.mark.parametrize(
    "allow", [[], ["my_proj"], ["hooks"], ["my_project.hooks.factory.more"], ["my_project.hooks:system"]]
)
def test_what_is_not_below_one_is_refused(project, allow):
    with pytest.raises(PermissionError, match=r"'my_project.hooks:factory' is not allowed") as caught:
        resolve_callable("my_project.hooks:factory", allow)
    assert isinstance(caught.value, hl.HooklineError)


def test_refusing_imports_nothing():
    assert "wave" not in sys.modules
    with pytest.raises(NotAllowedError):
        resolve_callable("wave:open", ["my_project"])
    assert "wave" not in sys.modules


def test_what_an_allowed_module_has_imported_from_elsewhere_is_refused(project):
    with pytest.raises(NotAllowedError, match=r"comes from '(posix|nt)'"):
        resolve_callable("my_project.hooks:system", ["my_project"])
    assert resolve_callable("my_project.hooks:system", ["my_project.hooks:system"]) is project.system
    assert resolve_callable("my_project.hooks:system") is project.system  # the control: without a list, anything


@pytest.mark.parametrize("name", ["subprocess", "joined", "table", "__builtins__", "__getattribute__"])
def test_what_does_not_say_where_it_comes_from_is_not_let_through(project, name):
    """A module, a method of a string, plain data: none of them has a ``__module__``."""
    project.subprocess, project.joined, project.table = subprocess, "".join, {"a": 1}
    project.__builtins__ = {}
    with pytest.raises(NotAllowedError, match=r"comes from '(subprocess|builtins)'"):
        resolve_callable(f"my_project.hooks:{name}", ["my_project"])
    resolve_callable(f"my_project.hooks:{name}", [f"my_project.hooks:{name}"])  # asked for by its full path
    resolve_callable(f"my_project.hooks:{name}")


def test_an_attribute_of_an_attribute_is_no_way_around(project):
    """The check is about the whole path: the module is what stands before the colon."""
    for path in ("my_project.hooks:system.__self__", "my_project:hooks.system"):
        with pytest.raises(AttributeError):
            resolve_callable(path, ["my_project"])


@pytest.mark.parametrize(
    ("path", "allow", "words"),
    [
        *(("my_project.hooks:factory", allow, "allow=") for allow in (["*"], [""], [3], ["."])),
        *((path, None, "is a string") for path in (3, ["os"], b"os:path")),
        *((path, None, "Invalid hook callable path") for path in (".hooks:f", "..hooks.f")),
    ],
)
def test_what_is_no_path_or_no_list_of_allowed_ones_is_refused(project, path, allow, words):
    with pytest.raises(ValueError, match=words) as caught:
        resolve_callable(path, allow)
    assert isinstance(caught.value, hl.HooklineError)


def test_neither_paths_nor_specs_need_torch():
    code = "import sys, hookline.specs.hook_spec; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
