"""What the built-in observers have in common: state by attribute, and a way to bow out.

`Analysis` is the base of the observers of this folder; everything else about a hook is in `TrainingHook`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hookline.analyses._series import Series
from hookline.analyses._window import GradientWindow
from hookline.errors import HooklineWarning, OptionError
from hookline.lifecycle.points import HookPoint
from hookline.messages import caller_stacklevel
from hookline.training.training_hook import LoopPoints, TrainingHook

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AT_REPORTS", "EACH_STEP", "Analysis", "BowsOut", "whole_number"]

AT_REPORTS: Final[LoopPoints] = {"epoch": {HookPoint.POST_EPOCH}, "step": {HookPoint.SNAPSHOT}}
"""Points of a hook that looks when an epoch is over; in the step loop, at snapshots."""
EACH_STEP: Final[LoopPoints] = {
    "epoch": {HookPoint.POST_STEP, HookPoint.POST_EPOCH},
    "step": {HookPoint.POST_STEP, HookPoint.SNAPSHOT},
}
"""Points of a hook that looks at every step and reports at those."""

_OWN_STATE: Final = (GradientWindow, Series)
"""What is kept and tells its state itself."""


class BowsOut(TrainingHook):
    """A hook that may find that it can do nothing in a run."""

    off = ""
    """Why it has switched itself off, if it has."""
    _has_told = False

    def turn_off(self, why: str) -> None:
        """It can do nothing in this run: said once, and it returns no metrics from now on."""
        self.off = why
        if not self._has_told:
            self._has_told = True
            warnings.warn(
                f"Hook {self.name!r} {why}, so it stays silent.", HooklineWarning, stacklevel=caller_stacklevel()
            )

    def reset(self) -> None:
        """Another run begins: it may have what this one lacked."""
        self.off = ""


class Analysis(BowsOut):
    """A built-in observer: draws no random numbers, and keeps its state in the attributes that it names."""

    pure = True
    kept: ClassVar[tuple[str, ...]] = ()
    """Attributes that a resumed run has to know: tensors, windows, series, numbers and lists; None is nothing yet."""

    def fits(self, window: GradientWindow, vector: Tensor, option: str, limit: float) -> bool:
        """Whether the vectors that it would keep are within the limit; if not, it is off."""
        if window.count == 0 and window.gib(vector) > limit:
            self.turn_off(
                f"would keep {window.size} gradients in {window.gib(vector):.1f} GiB, and max_gib={limit:g} (give "
                f"it a smaller {option}=, or a larger max_gib=)"
            )
        return not self.off

    def get_state_tensors(self) -> dict[str, Any]:
        """What it keeps between firings."""
        values = {name: getattr(self, name) for name in self.kept}
        states = {name: v.state() if isinstance(v, _OWN_STATE) else v for name, v in values.items()}
        return {name: state for name, state in states.items() if state is not None}

    def set_state_tensors(self, tensors: dict[str, Any]) -> None:
        """Take it back."""
        for name, value in tensors.items():
            if isinstance(getattr(self, name, None), _OWN_STATE):
                getattr(self, name).load(value)
            elif name in self.kept:
                setattr(self, name, value)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self.reset()
        self.set_state_tensors(dict(state))


def whole_number(hook: str, option: str, value: Any, least: int) -> int:
    """An option that counts something."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"{option}= of hook {hook!r} must be a whole number of at least {least}, got {value!r}.")
    return value
