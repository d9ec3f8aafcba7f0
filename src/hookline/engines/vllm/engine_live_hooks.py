"""Attach and remove hooks on the model of one worker of vLLM.

`WorkerHooks` has one `EngineLiveHooks` for hooks of the engine, and one for those of single requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hookline.engines.hooks_in_worker import at_once
from hookline.serve.live_hooks import LiveHook, LiveHooks

if TYPE_CHECKING:
    from torch import nn

__all__ = ["EngineLiveHooks"]


class EngineLiveHooks(LiveHooks):
    """The hooks on the model of one worker. All calls come between two steps, on the worker's only thread."""

    def __init__(self, model: nn.Module, widths: Mapping[str, int] | None = None) -> None:
        super().__init__(model, at_once, allow=None, widths=widths)
        self._is_compiled = False
        self._in_graph: set[str] = set()

    @property
    def made(self) -> int:
        """Return how many numbers of hooks are used up."""
        return self._made

    @made.setter
    def made(self, count: int) -> None:
        self._made = count

    def add_for_graph(self, spec: Mapping[str, Any]) -> list[LiveHook]:
        """Attach a hook that the compiler is going to meet."""
        self._is_compiled = True
        try:
            added = self.add_all([spec])
        finally:
            self._is_compiled = False
        self._in_graph |= {live.id for live in added if not live.counted.in_graph}
        return added

    def _remove(self, id: str) -> Any:
        if id not in self._in_graph:
            return super()._remove(id)
        self._in_graph.discard(id)
        live = self._live.pop(id)
        live.counted.off = True  # never off the module: compiled code without guards finds its hooks by their place
        return live, self._not_on([live])
