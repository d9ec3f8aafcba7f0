"""Where the time of a step goes: forward and backward, by module and by function.

Puts the hooks of a `Recorder` on every site, and hands out what it has noted as a table, as metrics, or as a trace
that chrome://tracing and ui.perfetto.dev show.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hookline.errors import OptionError
from hookline.observe.profile.backward_times import stretches_of
from hookline.observe.profile.chrome_trace import write_trace
from hookline.observe.profile.clock import CpuClock, clock_for
from hookline.observe.profile.profile_hooks import Recorder
from hookline.observe.profile.profile_rows import Measured, ProfileRow, rows_of, table_of
from hookline.sites.attach import attach_to_modules, new_attachment
from hookline.sites.functions.attach_function import attach_to_functions
from hookline.sites.functions.function_names import find_places
from hookline.sites.handle import HandleSet
from hookline.sites.kinds import FUNCTION, MODULE, Kind
from hookline.sites.select import Named, select
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

    A backward pass is told apart by when gradients come to a site's outputs and leave for its inputs. A site none of
    whose inputs takes a gradient (an embedding) counts as being at it until the next one has its turn, and what
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
    found = Profile(Recorder(clock_for(model), max_spans, takes_backward=backward))
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

    def __init__(self, recorder: Recorder) -> None:
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
        """The same as numbers: ``"layers.0/forward_ms"`` and so on, and ``"forward_ms"`` for the model as a whole."""
        metrics: dict[str, float] = {}
        for row in self.rows:
            prefix = f"{row.name}/" if row.name else ""
            metrics |= {f"{prefix}{key}": value for key, value in row.numbers().items()}
        return metrics

    def save_trace(self, path: str | Path) -> Path:
        """Write every call as an event for chrome://tracing or ui.perfetto.dev; the path."""
        return write_trace(Path(path), self._measured())

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
            self._handles.add(attach_to_modules(self._request(MODULE, kind, hook), model, whole + chosen))
        self._handles.add(attach_to_modules(self._request(MODULE, Kind.FORWARD, recorder.leave_module), model, chosen))
        # However the model's own call ends, with it has ended whatever was under way in it.
        always = self._request(MODULE, Kind.FORWARD, recorder.leave_module, always_call=True)
        self._handles.add(attach_to_modules(always, model, whole))
        for kind, hook in functions.items() if places else ():
            self._handles.add(attach_to_functions(self._request(FUNCTION, kind, hook), places, model))

    def _request(self, subject: SiteType, kind: Kind, hook: Any, *, always_call: bool = False) -> Attachment:
        request = new_attachment(hook, kind, site_type=subject, observe=True, always_call=always_call, name="profile")
        if kind is Kind.BACKWARD:
            request.clock = self._clock.mark
        return request


def _nothing_measured() -> Profile:
    found = Profile(Recorder(CpuClock(), 1, takes_backward=False))
    found.remove()
    return found


_NOTHING = ProfileRow("", "", 0, 0.0, 0.0, 0.0, 0.0, 0, None)
