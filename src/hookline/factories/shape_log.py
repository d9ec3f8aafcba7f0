"""``log_shapes``: log the shapes of tensors that go through modules, a line for each set of shapes and module.

Specs and users make it. It reads shapes alone, never numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from torch import Tensor

from hookline.factories.factory_hook import ByModule, Observer, read_options, tried_by
from hookline.factories.served_batch import shape_of
from hookline.tree import leaves

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.site_info import Site

__all__ = ["LogShapes", "log_shapes"]

logger = logging.getLogger("hookline.factories.log_shapes")

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
        self._seen: ByModule[tuple[str, set[str]]] = ByModule(lambda name: (name, set()))

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Log the shapes of an output, if they are new."""
        name, seen = self._seen.of(module, site)
        found = (_text(path, leaf) for path, leaf in leaves(output) if isinstance(leaf, Tensor))
        text = ", ".join(found) or "no tensors"
        if text not in seen and len(seen) < _MOST:
            seen.add(text)
            logger.log(self._level, "%s: %s", name, text)

    def to_metrics(self) -> dict[str, float]:
        """Return how many sets of shapes each module has shown, of those that were logged."""
        return {f"{name}/shapes": float(len(seen)) for name, (_, seen) in self._seen.items()}


def _text(path: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"output{f'.{path}' if path else ''} {shape_of(tensor)} {dtype} {tensor.device}"
