"""Measure where the time of a step goes: forward and backward, by module and by function.

Users call `profile`. It puts the hooks of a `ProfileRecorder` on every site, and shows what they recorded as a table or
as metrics.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from hookline.observe.profile.profile_hooks import (
    BACKWARD,
    FORWARD,
    ProfileRecorder,
    Span,
    Visit,
    clock_for,
)
from hookline.sites.attach import attach_to_modules, new_attachment
from hookline.sites.functions.attach_function import attach_to_functions
from hookline.sites.functions.function_names import find_places
from hookline.sites.handle import HandleSet
from hookline.sites.hook_at_site import AttachOptions
from hookline.sites.kinds import FUNCTION, MODULE, Kind
from hookline.sites.targets import Named, select
from hookline.sites.wrappers import unwrap
from hookline.tables import OFF, ON, THE_MODEL, ShownAsTable, Table

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
) -> Profile:
    """Measure where the time of a model goes.

    Recipe::

        with hookline.profile(model, "layers.#", functions="torch.nn.functional.*") as prof:
            model(x).sum().backward()
        print(prof)

    Times are those of the device the model is on: on a GPU they are taken by events in its stream, which are read
    when you ask for them, so the run does not wait. What a site spends in sites below it that are measured too is in
    its total and not in its own time, so own times add up to the whole. The hooks themselves take some microseconds
    per site; they count as own time of whatever is around it. Every call is kept until ``reset()``.

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
    """
    model = unwrap(model)
    chosen = [named for named in select(model, target, exclude=exclude) if named[1] is not model]
    places = [] if functions is None else find_places(functions)
    found = Profile(ProfileRecorder(clock_for(model), takes_backward=backward))
    try:
        found._attach(model, chosen, places)
    except BaseException:
        found.remove()
        raise
    found.reset()  # attaching took its time
    return found


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """The times and sizes of one module or function, all its calls together."""

    name: str
    """Dotted name of the module, empty for the model; or full name of the function."""
    kind: str
    """Its class; "function" for a function."""
    calls: int
    """The number of its calls."""
    forward_ms: float
    """Time in its forwards; a call that it makes of itself is part of the one around it."""
    forward_own_ms: float
    """The same without what is measured below it."""
    backward_ms: float
    """Time in its backwards."""
    backward_own_ms: float
    """The same without what is measured below it."""
    output_bytes: int
    """Size of the tensors it has returned."""
    allocated_bytes: int | None
    """The bytes its forwards have added to what is allocated on the GPU; None elsewhere."""

    def numbers(self) -> dict[str, float]:
        """Return all its numbers by name."""
        given = dataclasses.asdict(self).items()
        return {key: float(value) for key, value in given if key not in ("name", "kind") and value is not None}


_NOTHING: Final = ProfileRow("", "", 0, 0.0, 0.0, 0.0, 0.0, 0, None)


class Profile(ShownAsTable):
    """The measurements of one ``profile``; prints as a table.

    Recipe: ``with hookline.profile(model) as prof: ...``, then ``print(prof)``, ``prof.rows`` or
    ``prof.to_metrics()``.
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

    # -- what was measured -------------------------------------------------------------------------------

    @property
    def rows(self) -> tuple[ProfileRow, ...]:
        """Every module and function that was called, in the order of their first calls."""
        spans, visits = tuple(self._recorder.spans), tuple(self._recorder.visits)
        self._clock.settle()
        ended = {visit.span for visit in visits if visit.way == FORWARD and visit.end is not None}
        return _rows_of(spans, ended, _own_seconds(visits, self._clock.since(self._began)))

    @property
    def total(self) -> ProfileRow:
        """The model as a whole."""
        return next((row for row in self.rows if row.name == ""), _NOTHING)

    @property
    def wall_ms(self) -> float:
        """Time from the beginning of the measurement to its end, or until now, whatever was done in it."""
        stopped = self._clock.mark() if self._stopped is None else self._stopped
        self._clock.settle()
        return float(1e3 * self._clock.since(self._began)(stopped))

    def to_metrics(self) -> dict[str, float]:
        """Return the rows as numbers: ``"layers.0/forward_ms"`` and so on, ``"forward_ms"`` for the whole model."""
        metrics: dict[str, float] = {}
        for row in self.rows:
            prefix = f"{row.name}/" if row.name else ""
            metrics |= {f"{prefix}{key}": value for key, value in row.numbers().items()}
        return metrics

    def _table(self) -> Table:
        return _table_of(self.rows, self._clock.name, self.wall_ms)

    def _state(self) -> str:
        return ON if self._stopped is None else OFF

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
            able = [place for place in places if not (kind.is_gradient and place.is_operator)]
            self._handles.add(attach_to_functions(self._attachment(FUNCTION, kind, hook), able, model))

    def _attachment(self, site_type: SiteType, kind: Kind, hook: Any, *, always_call: bool = False) -> Attachment:
        attachment = new_attachment(
            hook, kind, AttachOptions(observe=True, always_call=always_call, name="profile"), site_type=site_type
        )
        if kind is Kind.BACKWARD:
            attachment.clock = self._clock.mark
        return attachment


# -- whose time it is ------------------------------------------------------------------------------------------------
#
# All marks of a thread make one time line, and each gap between two belongs to the innermost call that is open.
# Autograd runs what a forward has made in the reverse order, so a backward pass goes through the calls as the forward
# did, last one first. That tells what the marks do not: a call none of whose inputs takes a gradient (an embedding) is
# over when another call begins, and one that sends its gradient early is over with the last call within it.


def _own_seconds(visits: Sequence[Visit], when: Callable[[Any], float]) -> dict[tuple[Span, int], float]:
    """Return the time that is each call's own, in its forward and in backward passes; ``when`` gives seconds."""
    ended = [visit for visit in visits if visit.end is not None]  # what raised is time of the call around it
    ends = _ends(ended, when)
    own: dict[tuple[Span, int], float] = defaultdict(float)
    threads: dict[int, list[tuple[float, int, int, Visit]]] = defaultdict(list)
    for visit in ended:
        start, end, depth = when(visit.start), ends[visit], sum(1 for _ in visit.span.above())
        if end > start:
            # At one moment: ends before beginnings, the inner end first, the outer beginning first.
            threads[visit.thread] += [(start, 1, depth, visit), (end, 0, -depth, visit)]
    for marks in threads.values():
        _add_gaps(sorted(marks, key=lambda mark: mark[:3]), own)
    return own


def _ends(visits: Sequence[Visit], when: Callable[[Any], float]) -> dict[Visit, float]:
    """Return the end of each visit; in a backward pass not before those of the calls within it."""
    ends = {visit: when(visit.end) for visit in visits}
    told = [visit for visit in visits if visit.way == BACKWARD and visit.is_exact]
    found = {(visit.task, visit.span): visit for visit in told}
    for visit in sorted(told, key=lambda visit: -sum(1 for _ in visit.span.above())):  # the innermost first
        around = next((found[visit.task, span] for span in visit.span.above() if (visit.task, span) in found), visit)
        ends[around] = max(ends[around], ends[visit])
    return ends


def _add_gaps(marks: Sequence[tuple[float, int, int, Visit]], own: dict[tuple[Span, int], float]) -> None:
    """Go along a time line with a stack of the visits that are open; each gap belongs to its top."""
    stack: list[Visit] = []
    last = 0.0
    for moment, begins, _, visit in marks:
        if stack:
            own[stack[-1].span, min(stack[-1].way, BACKWARD)] += moment - last
        last = moment
        if begins:
            while stack and not _is_around(stack[-1], visit):
                stack.pop()
            stack.append(visit)
        elif visit in stack:
            del stack[stack.index(visit) :]


def _is_around(outer: Visit, visit: Visit) -> bool:
    """Return whether a visit that begins now is within another one that is open."""
    if outer.way != visit.way:  # a backward pass within a forward, or a forward that is repeated in the pass
        return outer.way < visit.way
    return any(around is outer.span for around in visit.span.above())


# -- rows ------------------------------------------------------------------------------------------------------------


def _rows_of(spans: Sequence[Span], ended: set[Span], own: dict[tuple[Span, int], float]) -> tuple[ProfileRow, ...]:
    """Return one row per site, in the order of their first calls; of calls that have ``ended``."""
    total = defaultdict(float, own)
    for span in reversed(spans):  # what is inside comes later, so by now it is complete
        if span.parent is not None:
            total[span.parent, FORWARD] += total[span, FORWARD]
            total[span.parent, BACKWARD] += total[span, BACKWARD]
    rows: dict[tuple[str, str], ProfileRow] = {}
    for span in spans:
        if span not in ended:
            continue
        site = span.name, span.kind
        row = rows.get(site, ProfileRow(*site, 0, 0.0, 0.0, 0.0, 0.0, 0, None))
        # Of a call within another one of the site, as in a model that calls itself, only its own times are new.
        new = 0 if any((around.name, around.kind) == site for around in span.above()) else 1
        allocated = row.allocated_bytes
        rows[site] = ProfileRow(
            *site,
            row.calls + 1,
            row.forward_ms + new * 1e3 * total[span, FORWARD],
            row.forward_own_ms + 1e3 * own[span, FORWARD],
            row.backward_ms + new * 1e3 * total[span, BACKWARD],
            row.backward_own_ms + 1e3 * own[span, BACKWARD],
            row.output_bytes + span.output_bytes,
            allocated if span.allocated is None else (allocated or 0) + new * span.allocated,
        )
    return tuple(rows.values())


_MAX_ROWS: Final = 60


def _table_of(rows: Sequence[ProfileRow], device: str, wall_ms: float) -> Table:
    """Return ``rows`` in columns, the slowest first, with what they add up to."""
    if not rows:
        return Table(title=f"Nothing was measured in {wall_ms:.1f} ms: no call of the model has ended.")
    on_gpu = any(row.allocated_bytes is not None for row in rows)
    header = ("name", "type", "calls", "forward ms", "own", "backward ms", "own", "output MiB", "allocated MiB")
    ordered = sorted(rows, key=lambda row: -(row.forward_ms + row.backward_ms))
    columns = len(header) if on_gpu else len(header) - 1
    cells = [_cells(row)[:columns] for row in ordered]
    forward, backward = (sum(getattr(row, f"{way}_own_ms") for row in rows) for way in ("forward", "backward"))
    sums = f"{forward:,.2f} ms forward and {backward:,.2f} ms backward, of {wall_ms:,.2f} ms ({device})"
    foot = [f"own times add up to {sums}"]
    rest = " that took less; all of them are in .rows"
    return Table(
        header[:columns], cells, numbers=range(2, columns), foot=foot, most=_MAX_ROWS, rest=rest, heat="column"
    )


def _cells(row: ProfileRow) -> tuple[str, ...]:
    times = (row.forward_ms, row.forward_own_ms, row.backward_ms, row.backward_own_ms)
    sizes = (row.output_bytes, row.allocated_bytes or 0)
    return (
        row.name or THE_MODEL,
        row.kind,
        f"{row.calls:,}",
        *(f"{ms:,.2f}" for ms in times),
        *(f"{size / 2**20:,.2f}" for size in sizes),
    )
