"""Load SGLang's own modules from its wheel, without the kernels that need CUDA.

``sglang/__init__.py`` is not run, because it imports everything. Packages that no CPU build exists for, or that only
name things here, are stand-ins.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = Path(os.environ.get("SGLANG_SOURCE", ROOT / ".sglang" / "source"))
ABSENT = frozenset({"IPython", "loguru", "sentencepiece", "torchao", "torchvision"})

sys.path.insert(0, str(ROOT / "tests" / "engines"))


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Make an empty module of every package in `ABSENT` that is not installed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        made = MagicMock(name=spec.name)
        made.__path__, made.__spec__, made.__name__, made.__version__ = [], spec, spec.name, "0"
        return made

    def exec_module(self, module: Any) -> None:
        """Do nothing."""


@pytest.fixture(scope="session")
def sglang() -> Any:
    """The package, bare; its modules are imported as usual."""
    if not (SOURCE / "sglang").is_dir():
        pytest.fail(f"{SOURCE} has no sglang; run make test-sglang, or set SGLANG_SOURCE to the contents of its wheel.")
    package = types.ModuleType("sglang")
    package.__path__ = [str(SOURCE / "sglang")]
    package.__spec__ = importlib.machinery.ModuleSpec("sglang", None, is_package=True)
    package.__version__ = next(SOURCE.glob("sglang-*.dist-info")).name.split("-")[1].removesuffix(".dist")  # type: ignore[attr-defined]
    sys.modules["sglang"] = package
    sys.path.append(str(SOURCE))  # for the version in its metadata
    sys.meta_path.append(StandIns())
    return package
