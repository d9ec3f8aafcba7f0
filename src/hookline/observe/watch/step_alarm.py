"""Say which rank, micro-batch and layer was the first with NaN, infinity or a spike.

Users call `alarm`. It listens to the steps of the model (`monitor`), forward by forward, and judges a step when it is
over.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from hookline.distributed.ranks import gather_objects, this_rank
from hookline.errors import OptionError
from hookline.messages import counted, short_repr
from hookline.observe.watch.bad_order import CalledPlace, CallOrder, name_doubts
from hookline.observe.watch.hooks import checked_kinds
from hookline.observe.watch.local_gradients import LOCAL_GRADIENT
from hookline.observe.watch.monitor import PlaceRow, StepListener, listen
from hookline.observe.watch.row import BAD, FIRES, INF, NAN, SQUARES
from hookline.sites.handle import HandleSet
from hookline.sites.optimizers import attach_optimizer, unwrap_optimizer
from hookline.tables import OFF, ON, ShownAsTable, Table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn
    from torch.optim import Optimizer

    from hookline.hook_types import Target

__all__ = ["StepAlarm", "Trouble", "alarm"]

logger = logging.getLogger("hookline.observe.alarm")

_KINDS: Final = ("forward", "backward", LOCAL_GRADIENT)
_KEPT: Final = 1000
"""How many troubles are kept: after the first NaN in a weight, every step has some."""
_LOGGED: Final = 10
_SHOWN: Final = 3
"""How many bad steps the table shows in full."""
_HEADER: Final = ("step", "micro_batch", "rank", "place", "what", "value", "usual", "places", "batch")
_HISTORY: Final = 5
"""Micro-batches that a place is seen in before one can be a spike."""
_SMOOTHING: Final = 0.9


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
    """``"NaN"``, ``"Inf"`` or ``"spike"``."""
    value: float
    """How many NaN or infinities; of a spike, the norm."""
    usual: float
    """Of a spike, the usual norm; else 0."""
    places: int
    """At how many places it was seen in this micro-batch."""
    order: int
    """The position of the place in the order in which places first had a tensor."""
    batch: Any = None
    """What ``note_batch`` was given."""
    doubts: tuple[str, ...] = ()
    """Other places that may have been the first. On a GPU the numbers of all calls of a module are added up, so which
    call was bad is not known where it was called several times; a spike is that of all calls together."""

    def cells(self) -> list[str]:
        """Return it as a row of the table of an alarm."""
        place = f"{self.place} or {name_doubts(self.doubts)}" if self.doubts else self.place
        value = f"norm {self.value:.4g}" if self.what == "spike" else f"{int(self.value)} numbers"
        usual = f"{self.usual:.4g}" if self.what == "spike" else ""
        where = f"{self.step}", f"{self.micro_batch}", f"{self.rank}"
        return [*where, place, self.what, value, usual, f"{self.places}", _cell(self.batch)]

    def __str__(self) -> str:
        where = f"step {self.step}, rank {self.rank}, micro-batch {self.micro_batch}"
        batch = "" if self.batch is None else f", batch {short_repr(self.batch, 80)}"
        others = self.places - 1
        if self.doubts:
            others -= len(self.doubts)
            doubt = f", the first among it and {name_doubts(self.doubts)}"
        else:
            doubt = ""
        more = f", and {'one place' if others == 1 else f'{others} places'} after it" if others else ""
        told = f"norm {self.value:.4g}, usually {self.usual:.4g}" if self.what == "spike" else f"{int(self.value)}"
        return f"{where}{batch}: {self.what} ({told}) at {self.place!r}{doubt}{more}"


def alarm(
    model: nn.Module,
    target: Target = "*",
    *,
    optimizer: Optimizer | None = None,
    on: str | Sequence[str] = _KINDS,
    spike: float | None = None,
    exclude: Target = None,
    scaler: Any = None,
) -> StepAlarm:
    """Find which rank, micro-batch and layer was the first with NaN, infinity or a spike.

    Recipe::

        alarm = hookline.observe.alarm(model, optimizer=optimizer, spike=10)
        for ids, batch in data:
            alarm.note_batch(ids)
            train_step(batch)
        print(alarm)
        first = alarm.gather()[:1]  # of all ranks; every rank has to call it

    Each trouble is logged when its step is over (logger ``hookline.observe.alarm``), by the rank that has it; ranks ask
    each other nothing before `gather`. The run stays the run it would have been, bit for bit.

    Args:
        model: The model; after DDP, FSDP2 or ``parallelize_module`` has wrapped it.
        target: Which modules, and with them the parameters below; all by default.
        optimizer: Its steps are the steps; without one, call ``alarm.step()`` after each.
        on: Where to look: ``"forward"``, ``"backward"``, and ``"param_grad_local"``, the gradients of parameters before
            ranks reduce them; after that every rank has the NaN of one.
        spike: How many times its usual norm makes a spike; None looks for NaN and infinity alone. The usual norm is a
            running mean, known after five micro-batches. Norms that stay high are one spike, and after five more
            micro-batches the usual ones.
        exclude: Modules and parameters to leave out.
        scaler: The ``GradScaler`` in use.
    """
    if spike is not None and not spike > 1:
        raise OptionError(f"spike= is how many times its usual norm makes a spike, 10 for instance; got {spike!r}.")
    kinds = checked_kinds(on)
    options = {"optimizer": optimizer, "scaler": scaler}
    listener = listen(model, target, on=kinds, stats=("norm", "nonfinite"), exclude=exclude, by_forward=True, **options)
    try:
        return StepAlarm(listener, optimizer, spike)
    except BaseException:
        listener.remove(quiet=True)
        raise


class StepAlarm(ShownAsTable):
    """The troubles that one `alarm` has found; prints as a table.

    Recipe: ``alarm = hookline.observe.alarm(model, optimizer=optimizer)``; then ``print(alarm)``, ``alarm.troubles``.
    Comes off by ``alarm.remove()``, or at the end of a ``with`` block.
    """

    def __init__(self, listener: StepListener, optimizer: Optimizer | None, spike: float | None) -> None:
        self.troubles: list[Trouble] = []
        """What this rank has found, the first first; at most 1,000."""
        self._listener = listener
        self._spike = spike
        self._usual: dict[str, _UsualNorm] = {}
        self._is_high = False
        """Whether the last micro-batch had a spike."""
        self._steps = 0
        self._first_judged: int | None = None
        """The first step in which a place had a usual norm."""
        self._removed = False
        self._handles = HandleSet()
        self._by_optimizer = optimizer is not None
        if optimizer is not None:
            inner = unwrap_optimizer(optimizer)
            self._handles.add(attach_optimizer(inner, self._end_step, on="step_post", name="alarm"))

    def note_batch(self, ids: Any) -> None:
        """Name the batch of the forwards that follow, until the next call: ``alarm.note_batch(batch["ids"])``."""
        self._listener.label = ids

    def step(self) -> None:
        """End a step; only where no optimizer was given."""
        if self._by_optimizer:
            raise OptionError("The optimizer makes the steps of this alarm; call step(), or give optimizer=, not both.")
        self._listener.watch.step()
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
        if not self._removed:
            self._removed = True
            self._handles.remove(quiet=True)
            self._listener.remove(quiet=quiet)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove(quiet=exc_info[0] is not None)

    def _table(self) -> Table:
        if not self.troubles:
            return Table(
                title=f"rank {this_rank()}: no trouble in {counted(self._steps, 'step')}", foot=self._unjudged()
            )
        shown = self._shown()
        rows = [each.cells() for each in shown]
        left_out = self.troubles[len(shown) :]
        more = () if not left_out else (_count_left_out(left_out),)
        return Table(list(_HEADER), rows, rule=False, foot=(*more, *self._unjudged()))

    def _shown(self) -> list[Trouble]:
        """Return the troubles of the first bad steps: after NaN in a weight, every step has the same."""
        steps = list(dict.fromkeys(each.step for each in self.troubles))
        last = steps[min(len(steps), _SHOWN) - 1]
        return [each for each in self.troubles if each.step <= last]

    def _unjudged(self) -> tuple[str, ...]:
        """Return which steps could not be compared with a usual norm."""
        last = self._steps - 1 if self._first_judged is None else self._first_judged - 1
        if self._spike is None or last < 0:
            return ()
        which = "step 0" if last == 0 else f"steps 0 to {last}"
        return (f"{which} not judged: no usual norm yet",)

    def _state(self) -> str:
        return OFF if self._removed else ON

    # -- at steps --------------------------------------------------------------------------------------------

    def _end_step(self, *args: Any) -> None:
        """Judge the step that is over, micro-batch by micro-batch."""
        self._listener.end_step(self._steps)
        for step in self._listener.arrived(wait=True):
            parts = [(part.of_places(step.owns), batch, part.order) for part, batch in step.parts]
            for micro_batch, (rows, batch, order) in enumerate(each for each in parts if each[0]):
                self._find(rows, micro_batch, batch, order)
        self._steps += 1

    def _find(self, rows: list[PlaceRow], micro_batch: int, batch: Any, order: CallOrder) -> None:
        """Note the first place of each kind of trouble in one micro-batch."""
        found: dict[str, dict[CalledPlace, tuple[float, float]]] = {}
        for each in rows:
            for what, value, usual in self._judge(each.place.label, each.row):
                found.setdefault(what, {})[each.called()] = value, usual
        was_high, self._is_high = self._is_high, "spike" in found
        if was_high:
            found.pop("spike", None)
        bad = order.sort([place for what in found if what != "spike" for place in found[what]]).places

        def position(what: str) -> tuple[int, int]:
            first = order.sort(found[what]).places[0]
            return (bad[0].number, bad.index(first)) if what != "spike" else (first.number, 0)

        for what in sorted(found, key=position):
            calls = order.sort(found[what])
            first = calls.places[0]
            seen = what, *found[what][first], len(calls.places), first.number, batch, calls.doubts
            self._note(Trouble(self._steps, micro_batch, this_rank(), first.label, *seen))

    def _judge(self, place: str, row: NDArray[np.float64]) -> list[tuple[str, float, float]]:
        """Return what is wrong with one place in one micro-batch: what, its value, its usual value."""
        fires, squares, bad, nan, inf = row[[FIRES, SQUARES, BAD, NAN, INF]].tolist()
        if bad:
            # Compiled code on a GPU has not counted them before its graph is made anew; there is at least one.
            return [("NaN", nan or 1.0, 0.0)] if nan or not inf else [("Inf", inf, 0.0)]
        norm = math.sqrt(squares / fires)
        usual = self._usual.setdefault(place, _UsualNorm())
        if usual.is_known and self._first_judged is None:
            self._first_judged = self._steps
        before = usual.value
        return [("spike", norm, before)] if usual.take(norm, self._spike) else []

    def _note(self, trouble: Trouble) -> None:
        if len(self.troubles) < _KEPT:
            self.troubles.append(trouble)
        if len(self.troubles) <= _LOGGED:
            logger.warning("%s", trouble)
        elif len(self.troubles) == _LOGGED + 1:
            logger.warning("rank %d: more follow, which are in alarm.troubles and not logged", this_rank())


_WORDS: Final = ("NaN", "Inf", "spike")


class _UsualNorm:
    """The running mean of the norms of one place."""

    def __init__(self) -> None:
        self.value = 0.0
        self._seen = self._high = 0

    @property
    def is_known(self) -> bool:
        """Whether enough norms were seen to call one a spike."""
        return self._seen >= _HISTORY

    def take(self, norm: float, spike: float | None) -> bool:
        """Take one more norm; return whether it is a spike. It has no part in the mean then, unless norms stay high."""
        if spike is not None and self.is_known and norm > spike * self.value:
            self._high += 1
            if self._high == _HISTORY:
                self._seen, self._high, self.value = 1, 0, norm
            return True
        self._seen, self._high = self._seen + 1, 0
        self.value += (norm - self.value) * max(1 - _SMOOTHING, 1 / self._seen)
        return False


def _cell(value: Any) -> str:
    return "" if value is None else short_repr(value, 40).strip("'")


def _count_left_out(troubles: list[Trouble]) -> str:
    """Return how many steps the table leaves out, in words."""
    steps = sorted({each.step for each in troubles})
    which = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} more steps, up to step {steps[-1]}"
    return f"and {which}, in alarm.troubles"
