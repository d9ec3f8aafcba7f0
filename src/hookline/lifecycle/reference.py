"""Find reference weights: a mapping, the result of a function, or a file of hookline, safetensors or torch.

`HookManager` asks `ReferenceWeights` for hooks that declare ``needs_reference_weights``; users call `read_weights`.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import torch
from torch import Tensor

from hookline.errors import CheckpointError, HooklineWarning
from hookline.messages import caller_stacklevel

if TYPE_CHECKING:
    from hookline.lifecycle.hook import TrainingHook

__all__ = ["ReferenceWeights", "read_weights"]

_KEY: Final = "hookline.checkpoint"
_WAY: Final = ("core", "model", "tensors")
"""Where the weights are in the tree of a checkpoint."""

Source = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]] | str | os.PathLike[str] | None


class ReferenceWeights:
    """Look for reference weights once per run.

    A path may have fields for what ``set_run_context`` says: ``"runs/{strategy}/final.pt"``.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.context: dict[str, Any] = {}
        """What ``set_run_context`` said; a path may name it."""
        self._has_warned = False
        self.reset()

    def reset(self) -> None:
        """Look again, and give again: another run begins."""
        self._found: Mapping[str, Tensor] | None = None
        self._has_looked = False
        self._given: WeakSet[TrainingHook] = WeakSet()

    def give(self, hook: TrainingHook) -> None:
        """Give a hook the weights, once, if there are any; warn once of the reason if there are none."""
        if not self._has_looked:
            self._has_looked = True
            try:
                self._found = self._look(self.context)
            except Exception as error:
                self._warn(error)
        if hook not in self._given:
            if self._found is not None:
                hook.set_reference_weights(self._found)
            self._given.add(hook)

    def _look(self, context: Mapping[str, Any]) -> Mapping[str, Tensor] | None:
        source: Any = self._source
        if isinstance(source, str | os.PathLike):
            source = read_weights(os.fspath(source).format(**context))
        elif callable(source):
            source = source()
        source = _model_of(source)
        return None if source is None else {name.removeprefix("_orig_mod."): value for name, value in source.items()}

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"The reference weights {self._source!r} could not be had ({type(error).__name__}: {error}); hooks "
                "that need them go without.",
                HooklineWarning,
                stacklevel=caller_stacklevel(),
            )


def read_weights(path: str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """Return the weights in a file, on the CPU; of a run's folder or its checkpoints, those of the newest.

    Recipe::

        reference = read_weights("runs/mod_arithmetic/random")
        hookline.HookManager(["gradient_projection"], reference_weights=reference, sinks=[...])
    """
    path = Path(path)
    if path.is_dir():
        path = _newest(path)
    if path.suffix != ".safetensors":
        found: Mapping[str, Tensor] = _model_of(torch.load(path, map_location="cpu", weights_only=True))
        return found
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        about = file.metadata() or {}
        if _KEY not in about:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = about[_KEY] or bytes(file.get_tensor("tree").numpy()).decode("ascii")
        return {name: file.get_tensor(number) for name, number in _numbers(text, path).items()}


def _model_of(found: Any) -> Any:
    """Return the weights inside a checkpoint that has other things beside them, or `found` itself."""
    inner = found.get("model") if isinstance(found, Mapping) else None
    return inner if isinstance(inner, Mapping) else found


def _newest(folder: Path) -> Path:
    found = sorted([*folder.glob("*.safetensors"), *folder.glob("checkpoints/*.safetensors")], key=lambda p: p.name)
    if not found:
        raise CheckpointError(f"{folder} has no checkpoints in it (*.safetensors). Name the file itself.")
    return found[-1]


def _numbers(text: str, path: Path) -> dict[str, str]:
    """Return the number of each weight's tensor in the tree: ["dict", {…}] holds them as ["tensor", number, …]."""
    try:
        node: Any = json.loads(text)
        for key in _WAY:
            node = node[1][key]
        return {name: str(entry[1]) for name, entry in node[1].items() if entry[0] == "tensor"}
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{path} is a checkpoint, and has no weights where they should be ({error}).") from error
