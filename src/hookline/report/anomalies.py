"""Find what looks wrong in a run, the worst first.

Takes facts and curves of one run, hands findings to `page`. Each rule is one function, with its threshold and the
reason for it beside it; all look at every value that was recorded, before anything is thinned. The rules that compare
a value with those just before it are in `recent`. docs/report.md has what they found in recorded runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hookline.report.metric_families import Place
from hookline.report.metric_series import Curve, Series
from hookline.report.recent_changes import FEWEST, Event, end_above_best, falls, rises

__all__ = ["find_anomalies", "looked_at"]

_DEAD: Final = 0.99
"""A layer of which so large a share is zero passes nothing on. ReLU alone leaves about half."""
_EXPLODED: Final = 100.0
"""Times its own median up to then. Norms of healthy runs move by ten at most, warm-up included."""
_VANISHED: Final = 1e-6
"""Of the largest gradient among the layers at that moment: what float32 can add to a weight that moves with it."""
_SPIKE: Final = 3.0
"""A loss that is so many times its recent level."""
_SMALL: Final = 0.01
"""Of the loss at the start: a rise that stays below this share of it is of no account."""
_GRADIENT_SPIKE: Final = 5.0
"""A gradient norm that is so many times its recent level. It moves more than a loss does."""
_FALL: Final = 0.05
"""An accuracy that is so far below its best, on a scale of 1."""
_ENDS_ABOVE: Final = 1.5
"""A training loss that ends at so many times its best level, and a twentieth of the first loss above it."""
_ENDS_SMALL: Final = 0.05
_FEW: Final = 5
"""Nothing is said of a curve before it has so many points."""
_LEVELS: Final = ("error", "warning", "notice")
_MAX_NAMED: Final = 50
"""So many metrics of one finding have a link; the rest are counted."""

_ZERO_SHARE: Final = re.compile(r"(zero|dead)_fraction$")
_SATURATED_SHARE: Final = re.compile(r"saturated_fraction$")
_SIZES: Final = re.compile(r"(^|_)(norm|rms|absmax|std)$")
_GRADIENT: Final = re.compile(r"(^|/|_)(grad|gradient|backward|param_grad)")
_GRADIENT_NORM: Final = re.compile(r"(^|/|_)(norm|rms)(_mean|_max)?$")
_LOSS: Final = re.compile(r"(^|/|_)loss$")
_NOT_TRAINED_ON: Final = re.compile(r"(^|/|_)(val|valid|validation|test|heldout|dev|initial)(_|/)|^eval/loss$")
_ACCURACY: Final = re.compile(r"(^|/|_)(acc|accuracy)$|(^|/)top[15]$")


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
    """Return findings as the page shows them: ``level``, ``title``, ``text``, ``sights`` and how many ``more``.

    Recipe: ``find_anomalies({}, series, places(curve.name for curve in series.curves))[0]["title"]``.
    """
    curves = _named(series, where)
    found = [
        *_of_the_run(facts),
        *_not_finite(curves),
        *_spikes(curves),
        *_falls(curves),
        *_rose(curves),
        *_sizes(curves, facts),
        *_dead(curves),
        *_vanished(curves),
        *_silent(facts),
    ]
    return sorted(found, key=lambda finding: _LEVELS.index(finding["level"]))


def looked_at(facts: Mapping[str, Any], series: Series, where: Mapping[str, Place]) -> dict[str, Any]:
    """Return how many curves of each kind the rules could judge: ``kinds``, and how many were too ``short``.

    Recipe: ``looked_at({}, series, {})["kinds"]`` is ``[["loss", 2], ["accuracy", 1], ["gradient norm", 0]]``.
    """
    curves = _named(series, where)
    kinds = [
        ("loss", _chosen(curves, _is_loss)),
        ("accuracy", _chosen(curves, _is_accuracy)),
        ("gradient norm", _chosen(curves, _gradient_norms(facts))),
    ]
    long = {kind: sum(bool(named.curve.steps.size > FEWEST) for named in found) for kind, found in kinds}
    short = sum(len(found) for _, found in kinds) - sum(long.values())
    return {"kinds": [[kind, count] for kind, count in long.items()], "short": short}


def _named(series: Series, where: Mapping[str, Place]) -> list[_Named]:
    """Return the curves that have points; of those that are the same throughout, the first."""
    return [_Named(curve, where.get(curve.name)) for curve in series.curves if curve.steps.size and not curve.same_as]


def _chosen(curves: Iterable[_Named], is_one: Callable[[_Named], bool]) -> list[_Named]:
    return [named for named in curves if is_one(named)]


def _is_loss(named: _Named) -> bool:
    return bool(_LOSS.search(_without_moment(named)))


def _is_accuracy(named: _Named) -> bool:
    return bool(_ACCURACY.search(_without_moment(named)))


def _without_moment(named: _Named) -> str:
    """Return the name without the moment or rank that tells two of a name apart."""
    return named.curve.name.split(" ")[0]


def _gradient_norms(facts: Mapping[str, Any]) -> Callable[[_Named], bool]:
    """Return what tells gradient norms: their name says so, or the description that their hook declares."""
    hooks = facts.get("hooks")
    told = {
        f"{hook}/{metric['name']}"
        for hook, one in (hooks.items() if isinstance(hooks, Mapping) else ())
        for metric in (one.get("metrics") or () if isinstance(one, Mapping) else ())
        if isinstance(metric, Mapping) and "name" in metric and "gradient" in str(metric.get("description", ""))
    }

    def is_one(named: _Named) -> bool:
        name = _without_moment(named)
        return bool(_GRADIENT_NORM.search(name)) and bool(_GRADIENT.search(name) or name in told)

    return is_one


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


def _sizes(curves: Sequence[_Named], facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Norms that exploded, then gradient norms that spiked without exploding."""
    sights = [sight for named in curves if _SIZES.search(named.statistic) and (sight := _explosion(named.curve))]
    if sights:
        sights.sort(key=lambda sight: sight.step)
        text = f"{_metrics(len(sights))} at more than {_EXPLODED:g} × their median before; first {sights[0].metric}."
        yield _finding("warning", "Exploding norms", text, sights)
    exploded = {sight.metric for sight in sights}
    rest = [named for named in _chosen(curves, _gradient_norms(facts)) if named.curve.name not in exploded]
    spikes = [_risen(named, event) for named in rest for event in rises(named.curve, _GRADIENT_SPIKE)]
    if spikes:
        text = (
            f"{_metrics(len({sight.metric for sight in spikes}))} at {_GRADIENT_SPIKE:g} × their recent level or more."
        )
        yield _finding("warning", "Gradient spikes", text, sorted(spikes, key=lambda sight: sight.step))


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
    groups: dict[str, dict[str, dict[str, Curve]]] = {}
    for named in curves:
        if named.place and _GRADIENT.search(named.group) and _SIZES.search(named.statistic):
            found = groups.setdefault(named.group, {}).setdefault(named.statistic, {})
            found[named.place.layer] = named.curve
    # A layer is small by all of its statistics or by none: one of them is enough to say so.
    rows = [found.get("norm") or next(iter(found.values())) for found in groups.values()]
    sights = [sight for group in rows for sight in _beside_others(group)]
    if sights:
        text = f"{_metrics(len(sights))} below a millionth of the largest layer's."
        yield _finding("notice", "Vanishing gradients", text, sights)


def _beside_others(rows: Mapping[str, Curve]) -> Iterator[Sight]:
    """Yield the rows, by layer, that are small beside the largest."""
    sizes = {layer: _late_size(curve) for layer, curve in rows.items()}
    largest = max((size for size in sizes.values() if np.isfinite(size)), default=0.0)
    small = {layer for layer, size in sizes.items() if size < _VANISHED * largest}
    for layer, curve in rows.items():
        if layer in small and curve.values.size > _FEW and not _is_cancelled(layer, small, rows):
            middle = int(curve.steps[curve.values.size // 2])
            yield Sight(curve.name, middle, f"{sizes[layer]:.2g} beside {largest:.2g}")


def _late_size(curve: Curve) -> float:
    """Return the median size in the second half of a curve; NaN if nothing there is finite."""
    late = np.abs(curve.values[curve.values.size // 2 :])
    finite = late[np.isfinite(late)]
    return float(np.median(finite)) if finite.size else np.nan


def _is_cancelled(layer: str, small: Collection[str], rows: Mapping[str, Curve]) -> bool:
    """Return whether it is a bias whose weight is well: in front of a normalization its gradient is zero by nature."""
    weight = layer.removesuffix("bias") + "weight"
    return layer.endswith("bias") and weight in rows and weight not in small


def _spikes(curves: Sequence[_Named]) -> Iterator[dict[str, Any]]:
    sights = [
        _risen(named, event)
        for named in _chosen(curves, _is_loss)
        for event in rises(named.curve, _SPIKE, _SMALL * _first(named.curve))
    ]
    if sights:
        text = f"{_metrics(len({sight.metric for sight in sights}))} at {_SPIKE:g} × their recent level or more."
        yield _finding("warning", "Loss spikes", text, sorted(sights, key=lambda sight: sight.step))


def _first(curve: Curve) -> float:
    """Return the level at the start, 0 if there is none."""
    finite = curve.values[np.isfinite(curve.values)][:_FEW]
    return float(np.median(finite)) if finite.size else 0.0


def _risen(named: _Named, event: Event) -> Sight:
    times = event.extreme / event.level
    until = "to the end" if event.until is None else f"over by {_step(event.until)}"
    return Sight(named.curve.name, event.step, f"from {event.level:.3g} to {event.extreme:.3g}, ×{times:.3g}; {until}")


def _falls(curves: Sequence[_Named]) -> Iterator[dict[str, Any]]:
    sights = [_fallen(named, event) for named in _chosen(curves, _is_accuracy) for event in _falls_of(named.curve)]
    if sights:
        text = f"{_metrics(len({sight.metric for sight in sights}))} at {_FALL:.0%} or more below the best before."
        yield _finding("warning", "Accuracy falls", text, sorted(sights, key=lambda sight: sight.step))


def _falls_of(curve: Curve) -> Iterator[Event]:
    """Yield its falls; a curve that goes beyond 1 is of percents."""
    largest = float(np.max(curve.values, initial=0.0, where=np.isfinite(curve.values)))
    yield from falls(curve, _FALL * (1.0 if largest <= 1.0 else 100.0))


def _fallen(named: _Named, event: Event) -> Sight:
    until = "to the end" if event.until is None else f"back at {_step(event.until)}"
    return Sight(named.curve.name, event.step, f"from {event.level:.3g} to {event.extreme:.3g}; {until}")


def _rose(curves: Sequence[_Named]) -> Iterator[dict[str, Any]]:
    """Training losses that end far above their best; a loss of other data may, when a model overfits."""
    sights = []
    for named in _chosen(curves, _is_loss):
        if not _NOT_TRAINED_ON.search(named.curve.name):
            event = end_above_best(named.curve, _ENDS_ABOVE, _ENDS_SMALL * _first(named.curve))
            if event is not None:
                text = f"best {event.level:.3g}, in the end {event.extreme:.3g}"
                sights.append(Sight(named.curve.name, event.step, text))
    if sights:
        yield _finding("warning", "The loss rose", "It ends far above its best, which is where the link leads.", sights)


def _step(step: int) -> str:
    return "the start" if step < 0 else f"step {step:,}"


def _bad(value: float) -> str:
    return "NaN" if value != value else "Inf" if value > 0 else "-Inf"


def _of(count: int, total: int) -> str:
    return f"{count:,} of {total:,} points"


def _metrics(count: int) -> str:
    return "1 metric" if count == 1 else f"{count:,} metrics"
