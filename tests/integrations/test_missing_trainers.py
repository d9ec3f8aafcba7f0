"""A trainer that is not installed: importing its adapter says what to install, and a broken one shows its own error."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from hookline.errors import MissingPackageError

PACKAGES = {
    "transformers": ("transformers",),
    "accelerate": ("accelerate", "accelerate.tracking"),
    "lightning": ("lightning", "lightning.pytorch", "pytorch_lightning"),
}


class Refusing:
    """Raises for these modules what an import of them would raise."""

    def __init__(self, names: tuple[str, ...], lacking: str | None = None) -> None:
        self.names, self.lacking = names, lacking

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {self.lacking or name!r}", name=self.lacking or name)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import an adapter anew where its package cannot be imported."""

    def load(adapter: str, lacking: str | None = None) -> None:
        for name in list(sys.modules):
            if name.partition(".")[0] in PACKAGES[adapter] or name == f"hookline.integrations.{adapter}":
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "meta_path", [Refusing(PACKAGES[adapter], lacking), *sys.meta_path])
        importlib.import_module(f"hookline.integrations.{adapter}")

    return load


@pytest.mark.parametrize("adapter", PACKAGES)
def test_a_missing_package_is_named_with_the_line_that_installs_it(without: Any, adapter: str) -> None:
    """The extra of hookline, not the package alone."""
    with pytest.raises(MissingPackageError, match=rf"pip install 'hookline\[{adapter}\]'"):
        without(adapter)
