"""A trainer that is not installed: importing its adapter says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from hookline.errors import MissingPackageError
from hookline.integrations.host_run import needed_package


@pytest.mark.parametrize("adapter", ["transformers", "accelerate", "lightning"])
def test_a_missing_package_is_named_with_the_line_that_installs_it(
    adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra of hookline, not the package alone."""
    for name in list(sys.modules):
        if name.partition(".")[0] == adapter or name == f"hookline.integrations.{adapter}":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, adapter, None)  # importing it raises ModuleNotFoundError
    with pytest.raises(MissingPackageError, match=rf"pip install 'hookline\[{adapter}\]'"):
        importlib.import_module(f"hookline.integrations.{adapter}")


def test_a_package_that_lacks_something_itself_shows_its_own_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="numpi") as caught, needed_package("lightning", "here"):
        raise ModuleNotFoundError("No module named 'numpi'", name="numpi")
    assert not isinstance(caught.value, MissingPackageError)
