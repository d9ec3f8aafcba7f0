"""Measure where the time of a step goes: forward and backward, by module and by function.

Users call `profile`. It puts the hooks of a `ProfileRecorder` on every site, and shows what they recorded as a table,
as metrics, or as a trace for chrome://tracing and ui.perfetto.dev.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hookline.errors import OptionError
from hookline.files import replace_file
from hookline.observe.profile.profile_hooks import CpuClock, ProfileRecorder, clock_for
from hookline.observe.profile.profile_rows import Measured, ProfileRow, Span, rows_of, stretches_of, table_of
from hookline.sites.attach import attach_to_modules, new_attachment
from hookline.sites.functions.attach_function import attach_to_functions
from hookline.sites.functions.function_names import find_places
from hookline.sites.handle import HandleSet
from hookline.sites.hook_at_site import AttachOptions
from hookline.sites.kinds import FUNCTION, MODULE, Kind
from hookline.sites.targets import Named, select
from hookline.sites.wrappers import unwrap
from hookline.tables import OFF, ON, ShownAsTable, Table

if TYPE_CHECKING:
    from torch import nn

    from hookline.hook_types import Target
    from hookline.sites.hook_at_site import Attachment
    from hookline.sites.kinds import SiteType

__all__ = ["Profile", "ProfileRow", "profile"]


def profile(
    model: nn.Module,
    target: Target = "*",
    *,
    functions: Any = None,
    exclude: Target = None,
    backward: bool = True,
    max_spans: int = 200_000,
) -> Profile:
    """Measure where the time of a model goes.

    Recipe::

        with hookline.profile(model, "layers.#", functions="torch.nn.functional.*") as prof:
            model(x).sum().backward()
        print(prof)
        prof.save_trace("trace.json")

    Times are those of the device the model is on: on a GPU they are taken by events in its stream, which are read
    when you ask for them, so the run does not wait. What a site spends in sites below it that are measured too is in
    its total and not in its own time, so own times add up to the whole. The hooks themselves take some microseconds
    per site; they count as own time of whatever is around it.

    The backward time of a site lasts from when gradients come to its outputs until they leave for its inputs. A site
    none of whose inputs takes a gradient (an embedding) counts as being at it until the next one begins, and what
    becomes of parameters before a module uses them may count for the module around it. A forward that activation
    checkpointing repeats is no call; its time is backward time of the modules that are repeated. A call that raises is
    counted for the model as a whole alone. In compiled code the hooks keep the compiler from joining what is on either
    side of them, so the parts of a compiled model cost more measured than not; functions do not show there.

    Args:
        model: The model. It is measured as a whole too, whatever the target.
        target: Which modules to measure, as in ``attach``.
        functions: Which functions to measure within the model, as in ``attach_function``; None for none.
        exclude: Modules to leave out.
        backward: Measure the backward pass as well.
        max_spans: How many calls to keep; later ones are counted in ``dropped`` and left out.
    """
    if not isinstance(max_spans, int):
        raise OptionError(f"max_spans= must be a whole number, got {max_spans!r}.")
    if max_spans < 1:
        raise OptionError(f"max_spans= must be at least 1, got {max_spans}.")
    model = unwrap(model)
    chosen = [named for named in select(model, target, exclude=exclude) if named[1] is not model]
    places = [] if functions is None else find_places(functions)
    found = Profile(ProfileRecorder(clock_for(model), max_spans, takes_backward=backward))
    try:
        found._attach(model, chosen, places)
    except BaseException:
        found.remove()
        raise
    found.reset()  # attaching took its time
    return found


class Profile(ShownAsTable):
    """The measurements of one ``profile``; prints as a table.

    Recipe: ``with hookline.profile(model) as prof: ...``, then ``print(prof)``, ``prof.rows``, ``prof.to_metrics()``
    or ``prof.save_trace("trace.json")``.
    """

    def __init__(self, recorder: ProfileRecorder) -> None:
        self._recorder = recorder
        self._clock = recorder.clock
        self._handles = HandleSet()
        self._began = self._clock.mark()
        self._stopped: Any = None

    def reset(self) -> None:
        """Forget what was measured so far, and go on."""
        self._recorder.reset()
        self._began = self._clock.mark()
        if self._stopped is not None:
            self._stopped = self._began

    def remove(self) -> None:
        """Take the hooks off; what was measured stays."""
        if self._stopped is None:
            self._stopped = self._clock.mark()
        self._handles.remove(quiet=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        # As with handles: a copied or unpickled model carries no hooks, so a profile it keeps has measured nothing.
        return _nothing_measured, ()

    # -- what was measured -------------------------------------------------------------------------------

    @property
    def rows(self) -> tuple[ProfileRow, ...]:
        """Every module and function that was called, in the order of their first calls."""
        return rows_of(self._measured())

    @property
    def total(self) -> ProfileRow:
        """The model as a whole."""
        return next((row for row in self.rows if row.name == ""), _NOTHING)

    @property
    def wall_ms(self) -> float:
        """Time from the beginning of the measurement to its end, or until now, whatever was done in it."""
        stopped = self._clock.mark() if self._stopped is None else self._stopped
        self._clock.settle()
        return 1e3 * self._clock.since(self._began)(stopped)

    @property
    def dropped(self) -> int:
        """Calls that were left out, because there were ``max_spans`` already."""
        return self._recorder.dropped

    def to_metrics(self) -> dict[str, float]:
        """Return the rows as numbers: ``"layers.0/forward_ms"`` and so on, ``"forward_ms"`` for the whole model."""
        metrics: dict[str, float] = {}
        for row in self.rows:
            prefix = f"{row.name}/" if row.name else ""
            metrics |= {f"{prefix}{key}": value for key, value in row.numbers().items()}
        return metrics

    def save_trace(self, path: str | Path) -> Path:
        """Write every call as an event for chrome://tracing or ui.perfetto.dev; return the path."""
        return _write_trace(Path(path), self._measured())

    def _table(self) -> Table:
        return table_of(self.rows, self._clock.name, self.wall_ms, self.dropped)

    def _state(self) -> str:
        return ON if self._stopped is None else OFF

    def _measured(self) -> Measured:
        spans = [span for span in tuple(self._recorder.spans) if span.end is not None]
        visits = tuple(self._recorder.visits)
        self._clock.settle()
        when = self._clock.since(self._began)
        return Measured({span: (when(span.start), when(span.end)) for span in spans}, stretches_of(visits, when))

    # -- hooks -------------------------------------------------------------------------------------------

    def _attach(self, model: nn.Module, chosen: list[Named], places: list[Any]) -> None:
        recorder, whole = self._recorder, [("", model)]
        gradients: dict[Kind, Any] = {}
        if recorder.takes_backward:
            gradients = {Kind.BACKWARD_PRE: recorder.enter_backward, Kind.BACKWARD: recorder.leave_backward}
        modules: dict[Kind, Any] = {Kind.FORWARD_PRE: recorder.enter_module, **gradients}
        functions = {Kind.FORWARD_PRE: recorder.enter_function, Kind.FORWARD: recorder.leave_function, **gradients}
        for kind, hook in modules.items():
            self._handles.add(attach_to_modules(self._attachment(MODULE, kind, hook), model, whole + chosen))
        self._handles.add(
            attach_to_modules(self._attachment(MODULE, Kind.FORWARD, recorder.leave_module), model, chosen)
        )
        # However the model's own call ends, all calls within it have ended, too.
        always = self._attachment(MODULE, Kind.FORWARD, recorder.leave_module, always_call=True)
        self._handles.add(attach_to_modules(always, model, whole))
        for kind, hook in functions.items() if places else ():
            self._handles.add(attach_to_functions(self._attachment(FUNCTION, kind, hook), places, model))

    def _attachment(self, site_type: SiteType, kind: Kind, hook: Any, *, always_call: bool = False) -> Attachment:
        attachment = new_attachment(
            hook, kind, AttachOptions(observe=True, always_call=always_call, name="profile"), site_type=site_type
        )
        if kind is Kind.BACKWARD:
            attachment.clock = self._clock.mark
        return attachment


def _nothing_measured() -> Profile:
    found = Profile(ProfileRecorder(CpuClock(), 1, takes_backward=False))
    found.remove()
    return found


_NOTHING = ProfileRow("", "", 0, 0.0, 0.0, 0.0, 0.0, 0, None)


# -- the trace -----------------------------------------------------------------------------------------------


def _write_trace(path: Path, measured: Measured) -> Path:
    """Write the Trace Event Format to ``path`` in one step, so that a reader never finds half a file."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"Cannot write the trace {str(path)!r}: there is no folder {str(path.parent)!r}.")
    if path.is_dir():
        raise IsADirectoryError(f"Cannot write the trace {str(path)!r}: that is a folder; add a file name.")
    text = json.dumps({"traceEvents": list(_events(measured)), "displayTimeUnit": "ms"})
    replace_file(path, text)
    return path


class _TraceRows:
    """The rows of the trace, one per thread and direction, by number, as the format wants it."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, int], int] = {}

    def number(self, direction: str, thread: int) -> int:
        """Return the row for ``direction`` in ``thread``."""
        return self.numbers.setdefault((direction, thread), len(self.numbers) + 1)

    def labels(self) -> Iterator[dict[str, Any]]:
        """Yield the events that label the rows."""
        threads = list(dict.fromkeys(thread for _, thread in self.numbers))
        for (direction, thread), number in self.numbers.items():
            label = direction if len(threads) == 1 else f"{direction}, thread {threads.index(thread) + 1}"
            for key, value in (("thread_name", {"name": label}), ("thread_sort_index", {"sort_index": number})):
                yield {"name": key, "ph": "M", "ts": 0, "pid": os.getpid(), "tid": number, "args": value}


def _events(measured: Measured) -> Iterator[dict[str, Any]]:
    rows = _TraceRows()
    for span, (start, end) in measured.forwards.items():
        yield _event(span, "forward", start, end, rows.number("forward", span.thread))
    for visit, start, end, _ in measured.backwards:
        category = "recompute" if visit.repeats else "backward"
        yield _event(visit.span, category, start, end, rows.number("backward", visit.thread))
    yield from rows.labels()


def _event(span: Span, category: str, start: float, end: float, row: int) -> dict[str, Any]:
    details = {"step": span.step, "call": span.call, "type": span.kind, "output_bytes": span.output_bytes}
    if span.where is not None:
        details["module"] = span.where
    return {
        "name": span.name or "(the model)",
        "cat": category,
        "ph": "X",
        "ts": 1e6 * start,
        "dur": 1e6 * (end - start),
        "pid": os.getpid(),
        "tid": row,
        "args": details,
    }
