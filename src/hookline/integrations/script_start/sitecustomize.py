"""Begin to follow a script that knows nothing of hookline: Python imports this file when it starts.

``hookline run -- COMMAND`` puts its folder first on PYTHONPATH, so every Python that the command starts reads it, the
workers of torchrun too. It imports nothing of its own accord: when the script has imported torch, `FirstStep` waits for
a step of an optimizer, and hands over to ``hookline.integrations.script_run`` there.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # that of typing would have to be imported, in every Python that the command starts
if TYPE_CHECKING:
    from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _run_own_sitecustomize() -> None:
    """Import the ``sitecustomize`` that Python would have imported without this one, if there is any."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _FOLDER]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


def _note_failed(text: str) -> None:
    """Leave a line for the process that started the command."""
    folder = os.environ.get("HOOKLINE_RUN_NOTES")
    if not folder:
        return
    try:
        with open(os.path.join(folder, f"{os.getpid()}.failed"), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:  # the one who would read it is gone
        pass


class _AfterTorch:
    """Call `_wait_for_a_step` when ``import torch`` is over."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the spec of torch, with a loader that makes the call; None of other modules."""
        if name != "torch":
            return None
        from functools import partial
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        try:
            spec = find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            loader.exec_module = partial(self._execute, loader.exec_module)
        return spec

    def _execute(self, original: Any, module: Any) -> None:
        # Not before: some packages look whether torch is there long before it is imported.
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        original(module)
        _wait_for_a_step()


def _wait_for_a_step() -> None:
    """Follow the script from its first step on."""
    try:
        from hookline.integrations.loop_events import FirstStep
    except ImportError as error:
        _note_failed(f"{sys.executable} cannot import hookline: {error}. Next: install it there.")
        return
    FirstStep(_begin)


def _begin(optimizer: Any, first: Any) -> bool:
    from time import perf_counter

    began = perf_counter()
    from hookline.integrations.script_run import begin_script

    return begin_script(optimizer, first, began)


_run_own_sitecustomize()
if os.environ.get("HOOKLINE_RUN"):
    sys.meta_path.insert(0, _AfterTorch())
