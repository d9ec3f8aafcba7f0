"""The recipes in the docstrings of ``hookline.serve`` run as they stand."""

from __future__ import annotations

import inspect
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from helpers_serve import Answer

import hookline

RECIPE = re.compile(r"^Recipe(?:: ``(.+?)``|::\n\n((?:    .*\n|\n)+))", re.MULTILINE)


def recipe(what: Any) -> str:
    """Return the code of the first recipe in a docstring."""
    found = RECIPE.search(f"{inspect.getdoc(what)}\n")
    assert found is not None, what
    return found[1] or textwrap.dedent(found[2])


def test_every_recipe_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    """With the model at ``models/tiny``, an engine that runs, and the end of a request at hand."""
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    os.symlink(folder, "models/tiny")
    answer = Answer()
    wanted = hookline.serve.StatesWanted(("model.layers.0",))
    engine.submit(hookline.serve.GenerationRequest("r0", (5, 6), states=wanted), answer)
    given = {"hookline": hookline, "engine": engine, "finished": answer.wait().finished}
    public = {name: getattr(hookline.serve, name) for name in hookline.serve.__all__}
    for name, what in {**public, "the folder": hookline.serve}.items():
        code = recipe(what).replace('"r1"', repr(name))  # requests that run at once have names of their own
        exec(compile(code, name, "exec"), dict(given))
    with pytest.raises(AssertionError):  # control: without a recipe it fails
        recipe(Answer)


def test_a_name_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server needs FastAPI, which comes with the extra; an engine alone does not."""
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "hookline.serve.http.app", raising=False)
    monkeypatch.delitem(vars(hookline.serve), "make_app", raising=False)
    with pytest.raises(hookline.errors.MissingPackageError, match=r"make_app needs fastapi, .*'hookline\[serve\]'"):
        hookline.serve.make_app
