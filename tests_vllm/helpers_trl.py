"""TRL's own worker extension, imported without the packages that only its training code needs.

Workers import this module too: `WeightSyncWorkerExtension` is the class that ``trl vllm-serve`` gives to vLLM.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

from helpers_vllm import PlainExtension

ABSENT = frozenset({"accelerate", "datasets", "pandas", "pyarrow"})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Make an empty module of every package in `ABSENT`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """Return the spec of a stand-in."""
        is_absent = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: Any) -> Any:
        """Return a module that has every name."""
        made = MagicMock(name=spec.name)
        made.__path__, made.__spec__, made.__name__, made.__version__ = [], spec, spec.name, "0"
        return made

    def exec_module(self, module: Any) -> None:
        """Do nothing."""


def _imported() -> Any:
    import transformers  # noqa: F401  # which looks for these packages, before there are stand-ins

    finder = StandIns()
    sys.meta_path.append(finder)
    try:
        from trl.scripts import vllm_serve

        return vllm_serve
    finally:
        sys.meta_path.remove(finder)
        for name in [each for each in sys.modules if each.partition(".")[0] in ABSENT]:
            del sys.modules[name]


WeightSyncWorkerExtension = _imported().WeightSyncWorkerExtension


class _Client:
    """Stand in for a trainer at the other end of TRL's communicator: every weight it sends has one value."""

    def __init__(self, value: float) -> None:
        self._value = value
        self.group = self

    def broadcast(self, weight: Any, src: int) -> None:
        """Send a weight."""
        weight.fill_(self._value)

    def barrier(self) -> None:
        """Do nothing: nobody else is there."""


class TrlExtension(WeightSyncWorkerExtension, PlainExtension):  # type: ignore[misc, valid-type]
    """TRL's extension, with a trainer that needs no GPU."""

    def connect_client(self, value: float) -> None:
        """Let TRL's `update_named_param` receive weights of this value."""
        self.communicator = _Client(value)
        self.client_rank = 1
