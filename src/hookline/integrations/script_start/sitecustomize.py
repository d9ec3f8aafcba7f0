"""Begin to follow a script that knows nothing of hookline: Python imports this file when it starts.

``hookline run -- COMMAND`` puts its folder first on PYTHONPATH, so every Python that the command starts reads it, the
workers of torchrun too. It imports nothing of its own accord: when the script has imported torch, it has torch call it
before the first step of any optimizer, and hands over to ``hookline.cli.script_session`` there.
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


def _note(what: str, text: str = "") -> None:
    """Leave a line for the process that started the command."""
    folder = os.environ.get("HOOKLINE_RUN_NOTES")
    if not folder:
        return
    try:
        with open(os.path.join(folder, f"{os.getpid()}.{what}"), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:  # the one who would read it is gone
        pass


class _AfterTorch:
    """Call a function when ``import torch`` is over."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the spec of torch, with a loader that calls the function; None of other modules."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                self._call_after(spec.loader)
                return spec
        return None

    def _call_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._function()

        loader.exec_module = exec_module


class _FirstStep:
    """Wait for the first step of an optimizer; remember what comes before it: losses, and a pass over the data."""

    def __init__(self) -> None:
        self.has_come = False
        self.latest_pass: Any = None
        self._handle: Any = None
        self._passes: Any = None
        self._losses: Any = None

    def wait(self) -> None:
        """Have torch call this before the first step, and follow every ``DataLoader`` and ``backward()`` until then."""
        _note("torch")
        from torch.optim.optimizer import register_optimizer_step_pre_hook
        from torch.utils.data import DataLoader

        self._handle = register_optimizer_step_pre_hook(self)
        try:
            from hookline.integrations.backward_losses import BackwardLosses
            from hookline.integrations.loader_passes import LoaderPasses
        except ImportError:  # said when the first step comes
            return
        self._passes = LoaderPasses(DataLoader, self._remember)
        self._losses = BackwardLosses(most=_MOST_LOSSES)

    def _remember(self, latest: Any) -> None:
        self.latest_pass = latest

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.has_come:
            return
        self.has_come = True  # torch is going through its hooks: this one is taken off when the step is over
        try:
            from hookline.cli.script_session import begin_script
        except ImportError as error:
            _note("failed", f"{sys.executable} cannot import hookline: {error}. Next: install it there.")
            return
        begin_script(optimizer, self.latest_pass, self._losses, self.remove)

    def remove(self) -> None:
        """Take everything off: the script is followed, or cannot be."""
        for each in (self._handle, self._passes, self._losses):
            if each is not None:
                each.remove()
        self.latest_pass = None


_MOST_LOSSES = 1000
"""How many are kept until the first step: in a process that makes none, they would be kept for ever."""
_run_own_sitecustomize()
if os.environ.get("HOOKLINE_RUN"):
    _note("python")
    sys.meta_path.insert(0, _AfterTorch(_FirstStep().wait))
