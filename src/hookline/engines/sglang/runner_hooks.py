"""Keep the hooks of one model runner of SGLang: attach them, tell them whose rows they see, report what they did.

`runner_patches` makes one `SglangHooks` for each model runner and calls it around its forwards and captures. Hooks go
on by the `LiveHooks` of the server, so that a hook that raises is switched off and the engine goes on.
"""

from __future__ import annotations

import atexit
import json
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from hookline.engines.hooks_in_worker import at_once, probe_action, silent_sites
from hookline.engines.output_widths import output_widths
from hookline.engines.sglang.sglang_options import SglangOptions
from hookline.errors import OptionError
from hookline.factories.served_batch import tokens_of_batch
from hookline.files import replace_file
from hookline.observe.tokens import Tokens, serving
from hookline.serve.counted_hooks import finite_metrics
from hookline.serve.generation.model_probe import hooks_suspended
from hookline.serve.live_hooks import LiveHook, LiveHooks

if TYPE_CHECKING:
    from torch import nn

__all__ = ["SglangHooks"]

logger = logging.getLogger("hookline.engines.sglang")

_LOOK_AFTER: Final = 3
"""Forwards after which hooks that have not fired are named: a prompt and two tokens."""
_REPORT_EVERY: Final = 100
"""Forwards between two reports: reading metrics waits for the device."""

_Live = list[LiveHook]  # `SglangHooks` has a method of that name
_Plain = list[dict[str, Any]]


class SglangHooks:
    """The hooks of one model runner.

    Recipe: ``hooks = hooks_of_runner(runner); print(hooks.list(), hooks.metrics())``.

    Args:
        model: The model of the runner.
        options: What the environment asks for.
        place: What the report of this worker is called.
        hidden_size: How many numbers the model keeps for each token between its layers, if that is known.
    """

    def __init__(
        self, model: nn.Module, options: SglangOptions, *, place: str = "0", hidden_size: int | None = None
    ) -> None:
        self.model = model
        self.steps = 0
        """Forwards of the runner while there was a hook."""
        self._options = options
        self._place = place
        self._live = LiveHooks(model, at_once, allow=None, widths=output_widths(model, hidden_size))
        self._has_logged = False
        atexit.register(self.close)  # SGLang's processes are mostly killed, which no hook outlives

    def add(self, specs: Sequence[Mapping[str, Any]]) -> _Live:
        """Attach hooks; log what is wrong with a spec, and go on with the next."""
        added: _Live = []
        for spec in specs:
            try:
                _check_action(spec)
                added += self._live.add_all([spec])
            except Exception as error:
                logger.error("hook %r is not attached: %s: %s", spec.get("name"), type(error).__name__, error)
        for live in added:
            logger.info("hook %r is on %s", live.name, ", ".join(live.matched))
        if added and self._options.in_graph:
            logger.warning(
                "CUDA graphs record the hooks: edits are part of them and stay on until the engine ends; hooks that "
                "observe fire only in forwards that replay no graph"
            )
        return added

    def remove(self, id: str) -> LiveHook:
        """Remove a hook, and flush what it has."""
        return self._live.remove(id)

    def list(self) -> _Live:
        """Return the hooks, the oldest first."""
        return self._live.list()

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each hook by its id."""
        return self._live.metrics()

    @property
    def needs_eager(self) -> bool:
        """Return whether forwards have to run without CUDA graphs, in which hooks do not fire."""
        return self._has_hooks and not self._options.in_graph

    @property
    def _has_hooks(self) -> bool:
        """Return whether a hook is on; one that raised is switched off."""
        return any(not live.off for live in self._live.list())

    @contextmanager
    def during_capture(self) -> Iterator[None]:
        """Keep hooks out of the CUDA graphs that the block records, unless they are to be part of them."""
        if self._options.in_graph:
            yield
        else:
            with hooks_suspended(self.model):
                yield

    @contextmanager
    def during_forward(self, batch: Any) -> Iterator[None]:
        """Tell hooks whose tokens are in ``batch`` for the block, which runs it."""
        if not self._has_hooks:
            yield
            return
        with serving(self._table(batch)):
            yield
        self.steps += 1
        if self.steps == _LOOK_AFTER:
            self._name_silent()
        if self.steps % _REPORT_EVERY == 0:
            self.write_report()  # which does not raise: the answers of this forward are there

    def close(self) -> None:
        """Write the last report, remove all hooks and flush them."""
        atexit.unregister(self.close)
        self.write_report()
        self._live.close()

    def write_report(self) -> None:
        """Write the hooks of this worker and their metrics to its file, if a folder was given."""
        folder = self._options.report
        if folder is None:
            return
        try:
            content = json.dumps({"steps": self.steps, "hooks": self._described()}, indent=1, allow_nan=False)
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / f"{socket.gethostname()}-{self._place}.json", content)
        except Exception as error:
            self._log_once(f"the report cannot be written: {type(error).__name__}: {error}")

    def _described(self) -> _Plain:
        from hookline.serve.http.hook_routes import hook_to_json

        metrics = self.metrics()
        return [{**hook_to_json(live), "metrics": finite_metrics(metrics.get(live.id, {}))} for live in self.list()]

    def _table(self, batch: Any) -> Tokens | None:
        try:
            return tokens_of_batch(batch)
        except Exception as error:  # another version of SGLang: hooks for all requests still work
            self._log_once(f"the requests of a batch cannot be read: {type(error).__name__}: {error}")
            return None

    def _name_silent(self) -> None:
        for live in self._live.list():
            for name, cause in silent_sites(live).items():
                logger.warning("hook %r has not fired on %s in %d forwards: %s", live.name, name, self.steps, cause)

    def _log_once(self, words: str) -> None:
        if not self._has_logged:
            self._has_logged = True
            logger.warning("%s", words)


def _check_action(spec: Mapping[str, Any]) -> None:
    """Refuse a probe that is to end answers, and say that nobody reads the flags of others."""
    action = probe_action(spec)
    if action == "stop":
        raise OptionError("action='stop' ends no answer on SGLang; use action='metric' and read the report.")
    if action == "flag":
        logger.warning(
            "hook %r has action='flag': answers of SGLang have no flags; tokens are counted", spec.get("name")
        )
