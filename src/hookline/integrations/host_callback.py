"""Share what the callbacks of trainers have in common: their arguments, and the `HostRun` that they call.

``HooklineCallback`` of the Trainer of Hugging Face and that of Lightning derive from `HostCallback`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from hookline.errors import OptionError
from hookline.integrations.host_manager import HostLogSink, check_options, check_report_to
from hookline.integrations.host_run import HostRun
from hookline.sinks.jsonl_sink import JSONLSink

if TYPE_CHECKING:
    from hookline.lifecycle.manager import HookManager


class HostCallback:
    """Hold the `HostRun` of a trainer; a derived class translates the events of the trainer into calls on it."""

    _logs_per_step = True
    """Whether the trainer can log numbers of earlier steps."""

    def __init__(
        self,
        hooks: Iterable[Any] | str | None = None,
        *,
        sinks: Iterable[Any] | None = None,
        report_to: str = "sinks",
        **options: Any,
    ) -> None:
        super().__init__()
        check_report_to(report_to, "trainer")
        has_own = options.get("run_file") is not None or options.get("manager") is not None
        if hooks is None and not has_own:
            raise OptionError(
                "HooklineCallback() has no hooks. Next: callbacks=[HooklineCallback(['norms'])], an object and not the "
                "class; or run_file=, or manager=."
            )
        if options.get("manager") is None:
            check_options(options, HostRun)
        self._reports = report_to == "trainer"
        log = HostLogSink(self._log, per_step=self._logs_per_step) if self._reports else None
        if sinks is None and not (self._reports or has_own):
            sinks = [JSONLSink()]  # metrics would go nowhere else
        self._make_host = partial(HostRun, hooks, sinks=sinks, report_to=log, **options)
        self._trainer: Any = None
        self._attached = ExitStack()

    @cached_property
    def _host(self) -> HostRun:
        """The run, made when it is first asked for: then ranks are known, and only rank 0 opens sinks."""
        return self._make_host()

    @property
    def _is_running(self) -> bool:
        """Whether a run is under way; to ask makes none, as one is not for an evaluation alone."""
        return "_host" in vars(self) and self._host.is_running

    @property
    def manager(self) -> HookManager:
        """The manager of the hooks: their metrics, errors and costs."""
        return self._host.manager

    def close(self) -> None:
        """End the run if the trainer failed without saying so, and close the sinks. May be called again."""
        self._end()
        if "_host" in vars(self):
            self._host.close()

    def _attach_to(self, trainer: Any, callbacks: Iterable[Any]) -> None:
        """Remember who calls; its checkpoint has one file for the state of hooks, so it takes one callback."""
        count = sum(isinstance(each, HostCallback) for each in callbacks)
        if count > 1:
            raise OptionError(
                f"The Trainer has {count} HooklineCallbacks, or one twice, and takes one. Next: put all hooks into "
                "one: HooklineCallback([first, second])."
            )
        self._trainer = trainer

    def _end(self, error: BaseException | None = None) -> None:
        self._attached.close()
        if self._is_running:
            self._host.end_run(error)

    def _log(self, metrics: dict[str, float], step: int) -> None:
        """Hand metrics to the loggers of the trainer."""
        raise NotImplementedError
