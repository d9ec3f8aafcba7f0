"""``log_shapes``: log the shapes of tensors that go through modules, a line for each set of shapes and module.

Specs and users make it. It reads shapes alone, never numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from hookline.factories.factory_hook import ByModule, Observer, read_options, tried_by
from hookline.factories.served_batch import shape_of
from hookline.tree import leaves

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.site_info import Site

__all__ = ["LogShapes", "log_shapes"]

logger = logging.getLogger("hookline.factories.log_shapes")

_TensorKind = tuple[str, tuple[int, ...], torch.dtype, torch.device]
"""A tensor: where it stands in the output, and its shape, dtype and device."""
_MOST: Final = 16
"""Lines that a module may have."""


@dataclass(frozen=True)
class ShapeOptions:
    """The config of ``log_shapes``."""

    level: Literal["debug", "info", "warning"] = "info"


@tried_by()
def log_shapes(config: Mapping[str, Any] | None = None) -> LogShapes:
    """Make a hook that logs the shapes, dtypes and devices of outputs, once for each set of them and module.

    Recipe::

        with hookline.attach(model, "*", log_shapes({"level": "warning"})):
            model(x)  # layers.0: output (2, 8, 64) float32 cpu

    Args:
        config: ``level``: ``"debug"``, ``"info"`` or ``"warning"``. A module has at most 16 lines: batches of all sizes
            would have one each.
    """
    return LogShapes(read_options("log_shapes", ShapeOptions, config))


class LogShapes(Observer):
    """Log the shapes of all modules that one ``log_shapes`` is on."""

    name = "log_shapes"

    def __init__(self, options: ShapeOptions) -> None:
        self._level = logging.getLevelNamesMapping()[options.level.upper()]
        self._seen: ByModule[tuple[str, set[tuple[_TensorKind, ...]]]] = ByModule(lambda name: (name, set()))

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Log the shapes of an output, if they are new."""
        name, seen = self._seen.of(module, site)
        kinds = tuple(
            (path, shape_of(leaf), leaf.dtype, leaf.device) for path, leaf in leaves(output) if isinstance(leaf, Tensor)
        )
        if kinds in seen or len(seen) > _MOST:
            return
        seen.add(kinds)
        if len(seen) > _MOST:
            logger.log(self._level, "%s: more than %d sets of shapes; no further ones are logged", name, _MOST)
        else:
            logger.log(self._level, "%s: %s", name, ", ".join(map(_text, kinds)) or "no tensors")

    def to_metrics(self) -> dict[str, float]:
        """Return how many sets of shapes each module has shown, up to one more than are logged."""
        return {f"{name}/shapes": float(len(seen)) for name, (_, seen) in self._seen.items()}


def _text(kind: _TensorKind) -> str:
    path, shape, dtype, device = kind
    return f"output{f'.{path}' if path else ''} {shape} {str(dtype).removeprefix('torch.')} {device}"
