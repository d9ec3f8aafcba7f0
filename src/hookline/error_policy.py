"""Decide what follows when a hook or a sink raises: count it, go on or not, log and warn once.

These have an `ErrorPolicy`: `ManagedHooks`, which has the hooks of a `HookManager` (lifecycle/managed_hooks.py); hooks
made from specs (specs/apply_specs.py); hooks of engines (engines/live_hooks.py); `FanOut` (records/log.py), which
shares its own with its `HelperProcess` (records/helper.py). Most folders call `warn_user` or `error_text`. A warning
may raise (``-W error``), so ``warn_later`` keeps it until nothing else is under way; then ``warn_pending`` warns.

A new value of `ON_ERROR` also goes into: the options ``on_error`` of runs/run.py, specs/hook_spec.py and
engines/request_options.py; `_CONSEQUENCES` here and in lifecycle/managed_hooks.py; ``_AFTER_ERROR`` of cli/run.py; the
places that compare ``on_error`` with a value (``on_error`` with ``==`` or ``!=``); and docs/lifecycle.md,
docs/specs.md, docs/integrations.md, docs/distributed.md, docs/serving.md and docs/command_line.md. Tests:
tests/test_errors.py.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Final

from hookline.errors import HooklineWarning, OptionError
from hookline.messages import caller_stacklevel

ON_ERROR: Final = ("raise", "warn", "disable")
"""The values of ``on_error=``."""
_CONSEQUENCES: Final = {"warn": "stays on; further errors are not logged", "disable": "is switched off"}
"""How a logged sentence ends, by policy. "raise" is left out: the error itself is seen."""


class ErrorPolicy:
    """Count errors by name, switch off what failed if asked to, and tell the user once per name.

    Recipe::

        try:
            hook(...)
        except Exception as error:
            if not policy.handle("my_hook", error):
                raise

    Safe to use from several threads.

    Args:
        on_error: ``"raise"``, ``"warn"`` (go on) or ``"disable"`` (go on without what failed).
        logger: Gets the first error of each name, with its traceback; None: nothing is logged.
        consequences: How a logged sentence ends, by policy: "Hook 'a' raised; it ...". Under a policy that has no entry
            nothing is logged.
        always_raise: Types of errors after which work never goes on, whatever the policy.
    """

    def __init__(
        self,
        on_error: str = "warn",
        logger: logging.Logger | None = None,
        consequences: Mapping[str, str] = _CONSEQUENCES,
        always_raise: tuple[type[Exception], ...] = (),
    ) -> None:
        if on_error not in ON_ERROR:
            raise OptionError(f"on_error= is one of {', '.join(map(repr, ON_ERROR))}; got {on_error!r}.")
        self.on_error = on_error
        self.counts: Counter[str] = Counter()
        """How many errors each name had."""
        self.last: dict[str, str] = {}
        """The last error of each name, as text."""
        self.disabled: set[str] = set()
        """The names that are switched off."""
        self._logger = logger
        self._consequences = consequences
        self._always_raise = always_raise
        self._lock = threading.Lock()
        self.pending: list[HooklineWarning] = []
        """Warnings that wait for `warn_pending`."""
        self._warned: set[str] = set()

    def can_continue(self, error: BaseException) -> bool:
        """Return whether work goes on after `error`; never after an interrupt (`KeyboardInterrupt`, …)."""
        return self.on_error != "raise" and isinstance(error, Exception) and not isinstance(error, self._always_raise)

    def count(self, name: str, error: BaseException, where: str = "") -> bool:
        """Count an error of `name` that happened `where`; return whether it is its first."""
        place = f" {where}" if where else ""
        with self._lock:
            self.counts[name] += 1
            self.last[name] = f"{type(error).__name__}{place}: {error}"
            return self.counts[name] == 1

    def handle(self, name: str, error: BaseException, where: str = "") -> bool:
        """Count an error of `name`, switch it off under ``"disable"``, log the first; return `can_continue`."""
        is_first = self.count(name, error, where)
        continues = self.can_continue(error)
        if continues and self.on_error == "disable":
            self.disabled.add(name)
        consequence = self._consequences.get(self.on_error)
        if is_first and self._logger is not None and consequence and (continues or self.on_error == "raise"):
            place = f" {where}" if where else ""
            self._logger.error("Hook %r raised%s; it %s", name, place, consequence, exc_info=error)
        return continues

    def why_disabled(self) -> dict[str, str]:
        """Return the names that are switched off, and the last error of each, if it is known in this process."""
        raised = {name: f" {self.last[name]}" if name in self.last else "" for name in sorted(self.disabled)}
        return {name: f"switched off, as it raised{text}" for name, text in raised.items()}

    def warn_later(self, about: str, sentence: str) -> bool:
        """Keep a warning for `warn_pending`, unless there was one `about` the same; return whether it is new."""
        with self._lock:
            if about in self._warned:
                return False
            self._warned.add(about)
            self.pending.append(HooklineWarning(sentence))
            return True

    def warn_pending(self) -> None:
        """Warn of what `warn_later` kept; a warning may raise, so call it when nothing else is under way."""
        while self.pending:
            warnings.warn(self.pending.pop(0), stacklevel=caller_stacklevel())


def warn_user(text: str) -> None:
    """Issue a `HooklineWarning` that points at the first line outside hookline."""
    warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())


def error_text(error: BaseException) -> str:
    """Return the class of an error and its text: ``"ValueError: no"``."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
