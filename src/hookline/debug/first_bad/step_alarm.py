"""Say which rank, micro-batch and layer was the first with NaN or infinity.

Users call `alarm` (``hookline.debug.alarm``). It listens to the steps of the model (`monitor`), forward by forward,
and judges a step when it is over, in `StepAlarm._end_step`.

It reads the columns of rows by number (``row.py``). Ranks exchange nothing before `gather`, which sends the troubles:
only there is every rank known to take part. Another kind of trouble is a word in `_WORDS` and a case in
`StepAlarm._find`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from hookline.distributed.ranks import gather_objects, this_rank
from hookline.errors import OptionError
from hookline.messages import counted, listed, short_repr
from hookline.observe.watch.monitor import NAMED, PlaceRow, RowPart, StepListener, listen
from hookline.observe.watch.row import BAD, INF, NAN
from hookline.phases import phase
from hookline.sites.handle import HandleSet
from hookline.sites.optimizers import attach_optimizer, checked_optimizer
from hookline.tables import OFF, ON, ShownAsTable, Table

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from hookline.hook_types import Target

logger = logging.getLogger("hookline.debug.alarm")

_KEPT: Final = 1000
"""How many troubles are kept: after the first NaN in a weight, every step has some."""
_LOGGED: Final = 10
"""How many are logged, and shown."""
_WORDS: Final = ("NaN", "Inf")


@dataclass(frozen=True)
class Trouble:
    """Something that was not as it should be, in one micro-batch on one rank."""

    step: int
    """The step of the optimizer, from 0."""
    micro_batch: int
    """Which forward of the step, from 0."""
    rank: int
    place: str
    """The first place where it was seen, in the order of calls: ``"layers.3/forward"``."""
    what: str
    """``"NaN"`` or ``"Inf"``."""
    value: float
    """How many NaN or infinities."""
    places: int
    """At how many places it was seen in this micro-batch."""
    order: int
    """The position of the place in the order in which places first had a tensor."""
    batch: Any = None
    """What ``note_batch`` was given."""
    doubts: tuple[str, ...] = ()
    """Other places that may have been the first. On a GPU the numbers of all calls of a module are added up, so which
    call was bad is not known where it was called several times."""

    def __str__(self) -> str:
        where = f"step {self.step}, rank {self.rank}, micro-batch {self.micro_batch}"
        batch = "" if self.batch is None else f", batch {short_repr(self.batch, 80)}"
        doubt = f", the first among it and {listed(self.doubts, NAMED)}" if self.doubts else ""
        others = self.places - 1 - len(self.doubts)
        more = f", and {counted(others, 'place')} after it" if others > 0 else ""
        return f"{where}{batch}: {self.what} ({int(self.value)} numbers) at {self.place!r}{doubt}{more}"


def alarm(
    model: nn.Module,
    target: Target = "*",
    *,
    optimizer: Optimizer | None = None,
    on: str | Sequence[str] = ("forward", "backward"),
    exclude: Target = None,
) -> StepAlarm:
    """Find which rank, micro-batch and layer was the first with NaN or infinity.

    Recipe::

        alarm = hookline.debug.alarm(model, optimizer=optimizer)
        for ids, batch in data:
            alarm.note_batch(ids)
            train_step(batch)
        print(alarm)
        first = alarm.gather()[:1]  # of all ranks; every rank has to call it

    Each trouble is logged when its step is over (logger ``hookline.debug.alarm``), by the rank that has it; ranks ask
    each other nothing before `gather`. The run stays the run it would have been, bit for bit.

    Args:
        model: The model; after DDP, FSDP2 or ``parallelize_module`` has wrapped it.
        target: Which modules, and with them the parameters below; all by default.
        optimizer: Its steps are the steps; without one, call ``alarm.step()`` after each.
        on: Where to look: ``"forward"``, ``"backward"``, both by default. Once ranks have reduced gradients, every rank
            has the NaN of one; these are before that.
        exclude: Modules and parameters to leave out.
    """
    inner = None if optimizer is None else checked_optimizer(optimizer)  # before the model has hooks
    return StepAlarm(listen(model, target, on=on, exclude=exclude), inner)


class StepAlarm(ShownAsTable):
    """The troubles that one `alarm` has found; prints as a table.

    Recipe: ``alarm = hookline.debug.alarm(model, optimizer=optimizer)``; then ``print(alarm)``, ``alarm.troubles``.
    Comes off by ``alarm.remove()``, or at the end of a ``with`` block.
    """

    def __init__(self, listener: StepListener, optimizer: Optimizer | None) -> None:
        self.troubles: list[Trouble] = []
        """What this rank has found, the first first; at most 1,000."""
        self._listener = listener
        self._steps = 0
        self._removed = False
        self._handles = HandleSet()
        """The hook on the optimizer, if one was given."""
        if optimizer is not None:
            self._handles.add(attach_optimizer(optimizer, self._end_step, on="step_post", name="alarm"))

    def note_batch(self, ids: Any) -> None:
        """Name the batch of the forwards that follow, until the next call: ``alarm.note_batch(batch["ids"])``."""
        self._listener.monitor.label = ids

    def step(self) -> None:
        """End a step; only where no optimizer was given."""
        if self._handles:
            raise OptionError("The optimizer makes the steps of this alarm; call step(), or give optimizer=, not both.")
        self._end_step()

    def gather(self) -> list[Trouble]:
        """Return the troubles of all ranks, the first first; every rank has to call it."""
        said = gather_objects(self.troubles, what="troubles of an alarm")
        every = [trouble for of_rank in said for trouble in of_rank]
        return sorted(every, key=lambda each: (each.step, each.micro_batch, each.order, each.rank))

    def to_metrics(self) -> dict[str, float]:
        """Return how many troubles this rank has found, by what they were."""
        return {f"alarm/{what}": float(sum(each.what == what for each in self.troubles)) for what in _WORDS}

    def reset(self) -> None:
        """Forget the troubles."""
        self.troubles = []

    def remove(self, *, quiet: bool = False) -> None:
        """Take all hooks off; what was found stays."""
        self._removed = True
        self._handles.remove(quiet=True)
        self._listener.remove(quiet=quiet)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove(quiet=exc_info[0] is not None)

    def _table(self) -> Table:
        if not self.troubles:
            return Table(title=f"rank {this_rank()}: no trouble in {counted(self._steps, 'step')}")
        rows = [(str(each),) for each in self.troubles]
        return Table(("trouble",), rows, most=_LOGGED, rest=" more, in alarm.troubles")

    def _state(self) -> str:
        return OFF if self._removed else ON

    # -- at steps --------------------------------------------------------------------------------------------

    def _end_step(self, *args: Any) -> None:
        """Judge the step that is over, micro-batch by micro-batch; a step that an intervention makes is passed over."""
        if phase() == "intervention":
            return
        self._listener.end_step(self._steps)
        for step in self._listener.arrived(wait=True):
            for micro_batch, part in enumerate(part for part in step.parts if part.of_places()):
                self._find(part, micro_batch)
        self._steps += 1

    def _find(self, part: RowPart, micro_batch: int) -> None:
        """Note the first place with NaN, and the first with infinity, in one micro-batch."""
        found: dict[str, dict[PlaceRow, float]] = {what: {} for what in _WORDS}
        for each in part.of_places(BAD):
            nan, inf = each.row[[NAN, INF]].tolist()
            # Compiled code on a GPU has not counted them before its graph is made anew; there is at least one.
            found["NaN" if nan or not inf else "Inf"][each] = nan or inf or 1.0
        bad = part.sort([*found["NaN"], *found["Inf"]]).places
        for what in dict.fromkeys("NaN" if place in found["NaN"] else "Inf" for place in bad):
            calls = part.sort(found[what])
            first = calls.places[0]
            seen = what, found[what][first], len(calls.places), first.number, part.label, calls.doubts
            self._note(Trouble(self._steps, micro_batch, this_rank(), first.label, *seen))

    def _note(self, trouble: Trouble) -> None:
        if len(self.troubles) < _KEPT:
            self.troubles.append(trouble)
        if len(self.troubles) <= _LOGGED:
            logger.warning("%s", trouble)
        elif len(self.troubles) == _LOGGED + 1:
            logger.warning("rank %d: more follow, which are in alarm.troubles and not logged", this_rank())
