"""Find reference weights: a mapping, the result of a function, or a file of hookline, safetensors or torch.

`HookManager` asks `ReferenceWeights` for hooks that declare ``needs_reference_weights``; users call `read_weights`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

from hookline import checkpoint_file
from hookline.error_policy import error_text, warn_user
from hookline.errors import CheckpointError
from hookline.guard.rng import kept_rng

if TYPE_CHECKING:
    from hookline.lifecycle.hook import TrainingHook

__all__ = ["ReferenceWeights", "read_weights"]

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
                with kept_rng():
                    self._found = self._look()
            except Exception as error:
                if not self._has_warned:
                    text = f"{self._source!r} cannot be read ({error_text(error)})"
                    warn_user(f"Hooks go without reference weights: {text}.")
                self._has_warned = True
        if hook not in self._given:
            if self._found is not None:
                hook.set_reference_weights(self._found)
            self._given.add(hook)

    def _look(self) -> Mapping[str, Tensor] | None:
        source: Any = self._source
        if isinstance(source, str | os.PathLike):
            source = read_weights(os.fspath(source).format(**self.context))
        elif callable(source):
            source = source()
        source = _model_of(source)
        return None if source is None else {name.removeprefix("_orig_mod."): value for name, value in source.items()}


def read_weights(path: str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """Return the weights in a file, on the CPU; of a run's folder or its checkpoints, those of the newest.

    Recipe::

        reference = read_weights("runs/mod_arithmetic/random")
        hookline.HookManager(["gradient_projection"], reference_weights=reference, sinks=[...])
    """
    path = Path(path)
    if path.is_dir():
        path = _newest(path)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if not checkpoint_file.is_checkpoint(path):
        found: Mapping[str, Tensor] = _model_of(torch.load(path, map_location="cpu", weights_only=True))
        return found
    try:
        tree = checkpoint_file.read(path, lambda device: torch.device("cpu"))
        return {name: each for name, each in tree["core"]["model"]["tensors"].items() if isinstance(each, Tensor)}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is a checkpoint, and has no weights where they should be ({error}).") from error


def _model_of(found: Any) -> Any:
    """Return the weights inside a checkpoint that has other things beside them, or `found` itself."""
    inner = found.get("model") if isinstance(found, Mapping) else None
    return inner if isinstance(inner, Mapping) else found


def _newest(folder: Path) -> Path:
    found = [path for kind in ("*.pt", "*.safetensors", "checkpoints/*.pt") for path in folder.glob(kind)]
    if not found:
        raise CheckpointError(f"{folder} has no checkpoints in it (*.pt, *.safetensors). Name the file itself.")
    return max(found, key=lambda path: path.name)
