"""What looks wrong in a run, the worst first.

Takes facts and curves of one run, hands findings to `page`. Each rule is one function, with its threshold and the
reason for it beside it; all look at every value that was recorded, before anything is thinned.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hookline.report.families import Place
from hookline.report.series import Curve, Series

__all__ = ["find_anomalies"]

_DEAD: Final = 0.99
"""A layer of which so large a share is zero passes nothing on. ReLU alone leaves about half."""
_EXPLODED: Final = 100.0
"""Times its own median up to then. Norms of healthy runs move by ten at most, warm-up included."""
_VANISHED: Final = 1e-6
"""Of the largest gradient among the layers at that moment: what float32 can add to a weight that moves with it."""
_SPIKE: Final = 3.0
"""Times the median of the steps before, and this many times further from it than they were."""
_SPREAD: Final = 8.0
_SMALL: Final = 0.25
"""Of the loss at the start: below that, batches differ by more than threefold in good health."""
_WINDOW: Final = 20
_FEW: Final = 5
"""Nothing is said of a curve before it has so many points."""
_MAX_NAMED: Final = 50
"""So many metrics of one finding have a link; the rest are counted."""

_ZERO_SHARE: Final = re.compile(r"(zero|dead)_fraction$")
_SATURATED_SHARE: Final = re.compile(r"saturated_fraction$")
_SIZES: Final = re.compile(r"(^|_)(norm|rms|absmax|std)$")
_GRADIENT: Final = re.compile(r"(^|/|_)(grad|gradient|backward|param_grad)")
_LOSS: Final = re.compile(r"(^|/|_)loss$")


@dataclass(frozen=True, slots=True)
class Sight:
    """One curve that shows it."""

    metric: str
    """Its name."""
    step: int
    """Where to look."""
    text: str
    """What is there."""


@dataclass(frozen=True, slots=True)
class _Named:
    """A curve, and where it is among layers."""

    curve: Curve
    place: Place | None

    @property
    def statistic(self) -> str:
        return self.place.statistic if self.place else self.curve.name.rsplit("/", 1)[-1].split(" ")[0]

    @property
    def group(self) -> str:
        return self.place.group if self.place else self.curve.name.rsplit("/", 1)[0]


def find_anomalies(facts: Mapping[str, Any], series: Series, where: Mapping[str, Place]) -> list[dict[str, Any]]:
    """Findings as the page shows them: ``level``, ``title``, ``text``, ``sights`` and how many ``more`` there are.

    Recipe: ``find_anomalies({}, series, places(curve.name for curve in series.curves))[0]["title"]``.
    """
    curves = [_Named(curve, where.get(curve.name)) for curve in series.curves if curve.steps.size]
    return [
        *_of_the_run(facts),
        *_not_finite(curves),
        *_spikes(curves),
        *_exploded(curves),
        *_dead(curves),
        *_vanished(curves),
        *_silent(facts),
    ]


def _finding(level: str, title: str, text: str, sights: Sequence[Sight] = ()) -> dict[str, Any]:
    named = [{"metric": sight.metric, "step": sight.step, "text": sight.text} for sight in sights[:_MAX_NAMED]]
    return {"level": level, "title": title, "text": text, "sights": named, "more": len(sights) - len(named)}


def _of_the_run(facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if facts.get("status") == "failed":
        yield _finding("error", "The run failed", str(facts.get("error") or "It ended by an error."))
    errors = facts.get("sink_errors")
    for sink, count in errors.items() if isinstance(errors, Mapping) else ():
        text = f"{count} times. The log has every record: hookline replay writes them once more."
        yield _finding("warning", f"{sink} could not write", text)


def _silent(facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    hooks = facts.get("hooks")
    if not isinstance(hooks, Mapping) or facts.get("status") != "finished":
        return
    silent = [name for name, hook in hooks.items() if isinstance(hook, Mapping) and hook.get("fired") == 0]
    if silent:
        yield _finding("notice", "Hooks that never fired", f"{', '.join(silent)}: asked for, and never due.")


def _not_finite(curves: Sequence[_Named]) -> Iterator[dict[str, Any]]:
    """The first moment is the cause, the rest mostly follows: sorted by step, then in the order of the model."""
    sights = [_first_bad(named.curve) for named in curves]
    sights += [_first_counted(named.curve) for named in curves if named.statistic in ("nonfinite", "nan", "inf")]
    found = sorted((sight for sight in sights if sight), key=lambda sight: sight.step)
    if found:
        first = found[0]
        text = f"First at {_step(first.step)}, in {first.metric}; {_metrics(len(found))} in all."
        yield _finding("error", "NaN or Inf", text, found)


def _first_bad(curve: Curve) -> Sight | None:
    bad = ~np.isfinite(curve.values)
    if not bad.any():
        return None
    first = int(bad.argmax())
    return Sight(
        curve.name, int(curve.steps[first]), f"{_bad(float(curve.values[first]))}, {_of(int(bad.sum()), bad.size)}"
    )


def _first_counted(curve: Curve) -> Sight | None:
    """Of a metric that counts what is not finite."""
    with np.errstate(invalid="ignore"):
        bad = curve.values > 0
    if not bad.any():
        return None
    first = int(bad.argmax())
    return Sight(curve.name, int(curve.steps[first]), f"{curve.values[first]:g} counted")


def _dead(curves: Sequence[_Named]) -> Iterator[dict[str, Any]]:
    """Layers that were zero to the end; parameters may be, as biases are when they are new."""
    for title, share in (("Dead units", _ZERO_SHARE), ("Saturated units", _SATURATED_SHARE)):
        chosen = [n for n in curves if share.search(n.statistic) and not n.group.endswith("/param")]
        sights = [sight for named in sorted(chosen, key=_by_kind) if (sight := _stayed(named.curve))]
        if sights:
            text = f"{_metrics(len(sights))} at {_DEAD:.0%} or more, to the end."
            yield _finding("warning", title, text, sights)


def _by_kind(named: _Named) -> int:
    """Activations before gradients: a unit that puts nothing out is why nothing comes back."""
    return int(bool(_GRADIENT.search(named.group)))


def _stayed(curve: Curve) -> Sight | None:
    since = _since(curve.values >= _DEAD)
    if since is None:
        return None
    step = int(curve.steps[since])
    return Sight(curve.name, step, f"{curve.values[-1]:.4g} from then on")


def _since(marked: NDArray[np.bool_]) -> int | None:
    """Where the marks begin that last to the end."""
    if not marked[-1]:
        return None
    clear = np.flatnonzero(~marked)
    return int(clear[-1]) + 1 if clear.size else 0


def _exploded(curves: Sequence[_Named]) -> Iterator[dict[str, Any]]:
    sights = [sight for named in curves if _SIZES.search(named.statistic) and (sight := _explosion(named.curve))]
    if sights:
        sights.sort(key=lambda sight: sight.step)
        text = f"{_metrics(len(sights))} at more than {_EXPLODED:g} × their median before; first {sights[0].metric}."
        yield _finding("warning", "Exploding norms", text, sights)


def _explosion(curve: Curve) -> Sight | None:
    finite = np.isfinite(curve.values)
    values, steps = np.abs(curve.values[finite]), curve.steps[finite]
    if values.size <= _FEW or values.max() <= _EXPLODED * np.median(values[:_FEW]):
        return None
    # Only candidates are looked at closely: a running median of every curve would be quadratic.
    for index in np.flatnonzero(values > _EXPLODED * np.median(values[:_FEW])):
        before = float(np.median(values[:index])) if index >= _FEW else 0.0
        if before > 0 and values[index] > _EXPLODED * before:
            return Sight(curve.name, int(steps[index]), f"{values[index]:.3g}, {values[index] / before:.0f} × before")
    return None


def _vanished(curves: Sequence[_Named]) -> Iterator[dict[str, Any]]:
    """Gradients that are nothing beside those of other layers, in the second half of the run."""
    groups: dict[str, dict[str, list[Curve]]] = {}
    for named in curves:
        if named.place and _GRADIENT.search(named.group) and _SIZES.search(named.statistic):
            groups.setdefault(named.group, {}).setdefault(named.statistic, []).append(named.curve)
    # A layer is small by all of its statistics or by none: one of them is enough to say so.
    rows = [found.get("norm") or next(iter(found.values())) for found in groups.values()]
    sights = [sight for group in rows for sight in _beside_others(group)]
    if sights:
        text = f"{_metrics(len(sights))} below a millionth of the largest layer's."
        yield _finding("notice", "Vanishing gradients", text, sights)


def _beside_others(rows: Sequence[Curve]) -> Iterator[Sight]:
    with np.errstate(invalid="ignore"):
        ends = [np.abs(curve.values[curve.values.size // 2 :]) for curve in rows]
        sizes = [float(np.median(end[np.isfinite(end)])) if np.isfinite(end).any() else np.nan for end in ends]
    largest = np.nanmax(sizes) if np.isfinite(sizes).any() else 0.0
    for curve, size in zip(rows, sizes, strict=True):
        if largest > 0 and size < _VANISHED * largest and curve.values.size > _FEW:
            middle = int(curve.steps[curve.values.size // 2])
            yield Sight(curve.name, middle, f"{size:.2g} beside {largest:.2g}")


def _spikes(curves: Sequence[_Named]) -> Iterator[dict[str, Any]]:
    sights = [sight for named in curves if _LOSS.search(named.curve.name) for sight in _jumps(named.curve)]
    if sights:
        text = f"{len(sights)} × a loss that is {_SPIKE:g} times the median of the {_WINDOW} before it."
        yield _finding("warning", "Loss spikes", text, sights)


def _jumps(curve: Curve) -> Iterator[Sight]:
    finite = np.isfinite(curve.values)
    values, steps = curve.values[finite], curve.steps[finite]
    if values.size <= _WINDOW:
        return
    windows = np.lib.stride_tricks.sliding_window_view(values, _WINDOW)[:-1]  # (moments, window), each before its own
    middle = np.median(windows, axis=1)
    spread = np.median(np.abs(windows - middle[:, None]), axis=1)
    now = values[_WINDOW:]
    high = (now > _SPIKE * middle) & (now > middle + _SPREAD * spread) & (now > _SMALL * middle[0])
    begins = high & ~np.concatenate([[False], high[:-1]])  # a spike of several steps is one
    for index in np.flatnonzero(begins)[:_MAX_NAMED]:
        yield Sight(curve.name, int(steps[index + _WINDOW]), f"{now[index]:.4g} after {middle[index]:.4g}")


def _step(step: int) -> str:
    return "the start" if step < 0 else f"step {step:,}"


def _bad(value: float) -> str:
    return "NaN" if value != value else "Inf" if value > 0 else "-Inf"


def _of(count: int, total: int) -> str:
    return f"{count:,} of {total:,} points"


def _metrics(count: int) -> str:
    return "1 metric" if count == 1 else f"{count:,} metrics"
