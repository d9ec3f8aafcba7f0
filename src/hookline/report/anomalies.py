"""Find what looks wrong in a run, the worst first.

`report_page` calls `find_anomalies` with the facts and curves of one run. Each rule is one function, with its threshold
and the reason for it beside it; all look at every value that was recorded, before anything is thinned. docs/report.md
has what they found in recorded runs. The flight recorder of ``hookline.debug`` asks `LossHistory`, which judges the
newest loss by the same rule.

Values that leave what the curve was just before are compared with recent values of the same curve, so a rule means the
same for a loss of 4 and for one of 0.004. Each threshold is the larger of what matters and six times the curve's own
noise; noise is measured on the differences of neighbours, so that a trend does not count as noise.
"""

from __future__ import annotations

import math
import re
from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hookline.report.metric_series import Curve, LayerPlace, RunSeries

_DEAD: Final = 0.99
"""Share of zeros from which a layer counts as dead. ReLU alone leaves about half."""
_EXPLODED: Final = 100.0
"""Times its own median up to then. Norms of healthy runs move by ten at most, warm-up included."""
_VANISHED: Final = 1e-6
"""Of the largest gradient among the layers at that moment: what float32 can add to a weight that moves with it."""
_PLACE: Final = 3.0
"""Times its recent level, of a size of a layer that is told with a loss spike."""
_NEAR: Final = 64
"""Steps before the spike in which that may have begun."""
_GRADIENT_SPIKE: Final = 5.0
"""Times its recent level, of a gradient norm, which moves more than a loss does."""
_FALL: Final = 0.05
"""Below its best, of an accuracy on a scale of 1."""
_ENDS_ABOVE: Final = 1.5
"""Times its best level at the end, of a training loss; and a twentieth of the first loss above it."""
_ENDS_SMALL: Final = 0.05
_FEW: Final = 5
"""Points of a curve before any rule judges it."""
_LEVELS: Final = ("error", "warning", "notice")
_MAX_TOLD: Final = 4
"""Findings that a terminal is told of."""
_MAX_NAMED: Final = 50
"""Metrics of one finding that have a link; the rest are counted."""

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
    """One curve that shows a finding."""

    metric: str
    """Its name."""
    step: int
    """Where to look."""
    text: str
    """What is there."""


@dataclass(frozen=True, slots=True)
class _PlacedCurve:
    """A curve, and its place among layers."""

    curve: Curve
    place: LayerPlace | None

    @property
    def name(self) -> str:
        """The metric's name, without the hook point or rank that tells two of a name apart."""
        return self.curve.name.split(" ")[0]

    @property
    def statistic(self) -> str:
        return self.place.statistic if self.place else self.curve.name.rsplit("/", 1)[-1].split(" ")[0]

    @property
    def group(self) -> str:
        return self.place.group if self.place else self.curve.name.rsplit("/", 1)[0]


def find_anomalies(
    facts: Mapping[str, Any],
    series: RunSeries,
    places: Mapping[str, LayerPlace],
    bad_steps: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return findings as the page shows them: ``level``, ``title``, ``text``, ``sights`` and how many ``more``.

    Args:
        facts: What ``run.json`` says, as `read_runs` has checked it.
        series: What was recorded.
        places: The place of each metric that is on a map.
        bad_steps: What the hook ``first_bad_operation`` found.
    """
    curves = _placed(series, places)
    found = [
        *_first_bad_operation(bad_steps),
        *_run_failures(facts),
        *_not_finite(curves, is_explained=bool(bad_steps) or "first_bad_operation" in facts.get("hooks", {})),
        *_loss_spikes(curves),
        *_accuracy_falls(curves),
        *_risen_losses(curves),
        *_large_norms(curves, facts),
        *_dead_units(curves),
        *_vanished_gradients(curves),
        *_silent_hooks(facts),
    ]
    return sorted(found, key=lambda finding: _LEVELS.index(finding["level"]))


def count_judged(facts: Mapping[str, Any], series: RunSeries, places: Mapping[str, LayerPlace]) -> dict[str, Any]:
    """Return how many curves the rules could judge: ``kinds``, how many were too ``short``, and ``why`` no loss."""
    curves = _placed(series, places)
    kinds = {"loss": _losses(curves), "accuracy": _accuracies(curves), "gradient norm": _gradient_norms(curves, facts)}
    long = {kind: sum(bool(one.curve.steps.size > FEWEST) for one in found) for kind, found in kinds.items()}
    short = sum(map(len, kinds.values())) - sum(long.values())
    why = "" if long["loss"] else _why_unjudged(series, kinds["loss"])
    return {"kinds": [[kind, count] for kind, count in long.items()], "short": short, "why": why}


def _why_unjudged(series: RunSeries, losses: Sequence[_PlacedCurve]) -> str:
    """Return why no loss could be judged."""
    if not series.curves:
        return "nothing was recorded"
    if not losses:
        return "no loss was recorded"
    points = max(one.curve.steps.size for one in losses)
    return f"the loss has {points} point{'s' * (points != 1)}, and {FEWEST + 1} are needed"


def tell_findings(findings: Sequence[Mapping[str, Any]], looked: Mapping[str, Any]) -> list[str]:
    """Return what was found as lines for a terminal, and what `count_judged` says could not be judged."""
    lines = [f"{finding['title']}: {finding['text']}" for finding in findings[:_MAX_TOLD]]
    if len(findings) > _MAX_TOLD:
        lines.append(f"{len(findings) - _MAX_TOLD} more on the page.")
    judged = ", ".join(f"{kind} ({count})" for kind, count in looked["kinds"] if count)
    if not findings and judged:
        lines.append(f"Nothing unusual in the curves that were long enough to judge: {judged}.")
    return [*lines, f"Could not judge the loss: {looked['why']}."] if looked["why"] else lines


def _placed(series: RunSeries, places: Mapping[str, LayerPlace]) -> list[_PlacedCurve]:
    """Return the curves that have points; of those that are the same throughout, the first."""
    found = [curve for curve in series.curves if curve.steps.size and not curve.same_as]
    return [_PlacedCurve(curve, places.get(curve.name)) for curve in found]


def _losses(curves: Iterable[_PlacedCurve]) -> list[_PlacedCurve]:
    return [one for one in curves if _LOSS.search(one.name)]


def _accuracies(curves: Iterable[_PlacedCurve]) -> list[_PlacedCurve]:
    return [one for one in curves if _ACCURACY.search(one.name)]


def _gradient_norms(curves: Iterable[_PlacedCurve], facts: Mapping[str, Any]) -> list[_PlacedCurve]:
    """Return the curves whose name, or the description that their hook declares, says that they are gradient norms."""
    declared = {
        f"{hook}/{metric.get('name')}"
        for hook, one in facts.get("hooks", {}).items()
        for metric in one.get("metrics", ())
        if "gradient" in str(metric.get("description", ""))
    }
    norms = [one for one in curves if _GRADIENT_NORM.search(one.name)]
    return [one for one in norms if _GRADIENT.search(one.name) or one.name in declared]


def _finding(level: str, title: str, text: str, sights: Sequence[Sight] | None = None) -> list[dict[str, Any]]:
    """Return a finding, none if ``sights`` is empty; ``{metrics}`` in ``text`` says how many metrics there are."""
    if sights is not None and not sights:
        return []
    sights = sights or ()
    count = len({sight.metric for sight in sights})
    text = text.replace("{metrics}", "1 metric" if count == 1 else f"{count:,} metrics")
    named = [asdict(sight) for sight in sights[:_MAX_NAMED]]
    return [{"level": level, "title": title, "text": text, "sights": named, "more": len(sights) - len(named)}]


def _by_step(sights: Iterable[Sight | None]) -> list[Sight]:
    return sorted((sight for sight in sights if sight), key=lambda sight: sight.step)


# -- the run itself -----------------------------------------------------------------------------------------------


def _run_failures(facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if facts.get("status") == "failed":
        yield from _finding("error", "The run failed", str(facts.get("error") or "It ended by an error."))
    for sink, count in facts.get("sink_errors", {}).items():
        text = f"{count} times. The log has every record: hookline replay writes them once more."
        yield from _finding("warning", f"{sink} could not write", text)


def _silent_hooks(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    silent = [name for name, hook in facts.get("hooks", {}).items() if hook.get("fired") == 0]
    if not silent or facts.get("status") != "finished":
        return []
    return _finding("notice", "Hooks that never fired", f"{', '.join(silent)}: never due, or not attached.")


# -- values that are not finite, units that are dead --------------------------------------------------------------


def _first_bad_operation(bad_steps: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what the hook of that name found first: step, operator, module and line."""
    for first in bad_steps[:1]:
        operation = first.get("operation")
        source = operation.get("source") if isinstance(operation, Mapping) else None
        more = f" {len(bad_steps)} steps were reported." if len(bad_steps) > 1 else ""
        told = str(first.get("headline", f"step {first.get('step')}"))
        text = f"{told[:1].upper()}{told[1:]}{f', at {source}' if source else ''}.{more}"
        yield from _finding("error", "First bad operation", text)


_ORDER_UNKNOWN: Final = (
    " Reports are too far apart to say which layer was first: metrics of one step are in the order of the model. The "
    "hook first_bad_operation finds the operator, the module and the line."
)


def _not_finite(curves: Sequence[_PlacedCurve], *, is_explained: bool) -> Iterator[dict[str, Any]]:
    """Yield NaN and Inf by step, then in the order of the model; say how to find the first, unless it is known."""
    sights = [_first_bad(one.curve) for one in curves]
    sights += [_first_counted(one.curve) for one in curves if one.statistic in ("nonfinite", "nan", "inf")]
    found = _by_step(sights)
    if found:
        text = f"First at {_step_text(found[0].step)}, in {found[0].metric}; {{metrics}} in all."
        yield from _finding("error", "NaN or Inf", text + ("" if is_explained else _ORDER_UNKNOWN), found)


def _first_bad(curve: Curve) -> Sight | None:
    bad = ~np.isfinite(curve.values)
    if not bad.any():
        return None
    first = int(bad.argmax())
    value = float(curve.values[first])
    word = "NaN" if value != value else "Inf" if value > 0 else "-Inf"
    return Sight(curve.name, int(curve.steps[first]), f"{word}, {int(bad.sum()):,} of {bad.size:,} points")


def _first_counted(curve: Curve) -> Sight | None:
    """Return the first count of a metric that counts what is not finite."""
    with np.errstate(invalid="ignore"):
        bad = curve.values > 0
    if not bad.any():
        return None
    first = int(bad.argmax())
    return Sight(curve.name, int(curve.steps[first]), f"{curve.values[first]:g} counted")


def _dead_units(curves: Sequence[_PlacedCurve]) -> Iterator[dict[str, Any]]:
    """Yield layers that were zero to the end; not parameters, as new biases are zero."""
    for title, share in (("Dead units", _ZERO_SHARE), ("Saturated units", _SATURATED_SHARE)):
        chosen = [one for one in curves if share.search(one.statistic) and not one.group.endswith("/param")]
        # Activations before gradients: a unit that puts nothing out is why no gradient comes back.
        chosen.sort(key=lambda one: bool(_GRADIENT.search(one.group)))
        sights = [sight for one in chosen if (sight := _dead_to_the_end(one.curve))]
        yield from _finding("warning", title, f"{{metrics}} at {_DEAD:.0%} or more, to the end.", sights)


def _dead_to_the_end(curve: Curve) -> Sight | None:
    alive = np.flatnonzero(~(curve.values >= _DEAD))
    since = int(alive[-1]) + 1 if alive.size else 0
    if since == curve.values.size:
        return None
    return Sight(curve.name, int(curve.steps[since]), f"{curve.values[-1]:.4g} from then on")


# -- norms and gradients ------------------------------------------------------------------------------------------


def _large_norms(curves: Sequence[_PlacedCurve], facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield norms that exploded, then gradient norms that spiked without exploding."""
    sights = _by_step(_explosion(one.curve) for one in curves if _SIZES.search(one.statistic))
    if sights:
        text = f"{{metrics}} at more than {_EXPLODED:g} × their median before; first {sights[0].metric}."
        yield from _finding("warning", "Exploding norms", text, sights)
    exploded = {sight.metric for sight in sights}
    rest = [one.curve for one in _gradient_norms(curves, facts) if one.curve.name not in exploded]
    spikes = _by_step(_risen(curve, event) for curve in rest for event in rises(curve, _GRADIENT_SPIKE))
    text = f"{{metrics}} at {_GRADIENT_SPIKE:g} × their recent level or more."
    yield from _finding("warning", "Gradient spikes", text, spikes)


def _explosion(curve: Curve) -> Sight | None:
    finite = np.isfinite(curve.values)
    values, steps = np.abs(curve.values[finite]), curve.steps[finite]
    if values.size <= _FEW:
        return None
    is_high = values > _EXPLODED * np.median(values[:_FEW])
    before = sorted(values[:_FEW].tolist())  # kept sorted: a median anew at each point takes a minute for 10,000 points
    for index in range(_FEW, values.size if is_high.any() else 0):
        middle = len(before) // 2
        median, value = (before[middle] + before[~middle]) / 2, float(values[index])
        if is_high[index] and value > _EXPLODED * median > 0:
            return Sight(curve.name, int(steps[index]), f"{value:.3g}, {value / median:.0f} × before")
        insort(before, value)
    return None


def _vanished_gradients(curves: Sequence[_PlacedCurve]) -> Iterator[dict[str, Any]]:
    """Yield gradients that are tiny beside those of other layers, in the second half of the run."""
    groups: dict[str, dict[str, dict[str, Curve]]] = {}
    for one in curves:
        if one.place and _GRADIENT.search(one.group) and _SIZES.search(one.statistic):
            groups.setdefault(one.group, {}).setdefault(one.statistic, {})[one.place.layer] = one.curve
    # A layer is small by all of its statistics or by none, so one of them is enough.
    layers = [found.get("norm") or next(iter(found.values())) for found in groups.values()]
    sights = [sight for by_layer in layers for sight in _small_beside_others(by_layer)]
    text = "{metrics} below a millionth of the largest layer's."
    yield from _finding("notice", "Vanishing gradients", text, sights)


def _small_beside_others(by_layer: Mapping[str, Curve]) -> Iterator[Sight]:
    sizes = {layer: _late_size(curve) for layer, curve in by_layer.items()}
    largest = max((size for size in sizes.values() if np.isfinite(size)), default=0.0)
    small = {layer for layer, size in sizes.items() if size < _VANISHED * largest}
    for layer, curve in by_layer.items():
        if layer in small and curve.values.size > _FEW and not _is_cancelled(layer, small, by_layer):
            middle = int(curve.steps[curve.values.size // 2])
            yield Sight(curve.name, middle, f"{sizes[layer]:.2g} beside {largest:.2g}")


def _late_size(curve: Curve) -> float:
    """Return the median size in the second half of a curve; NaN if nothing there is finite."""
    late = np.abs(curve.values[curve.values.size // 2 :])
    finite = late[np.isfinite(late)]
    return float(np.median(finite)) if finite.size else np.nan


def _is_cancelled(layer: str, small: Collection[str], by_layer: Mapping[str, Curve]) -> bool:
    """Return whether it is a bias whose weight is well: before a normalization its gradient is always zero."""
    weight = layer.removesuffix("bias") + "weight"
    return layer.endswith("bias") and weight in by_layer and weight not in small


# -- losses and accuracies ----------------------------------------------------------------------------------------


def _loss_spikes(curves: Sequence[_PlacedCurve]) -> list[dict[str, Any]]:
    losses = [one.curve for one in _losses(curves)]
    sights = _by_step(_risen(curve, event) for curve in losses for event in loss_spikes(curve, first_level(curve)))
    if not sights:
        return []
    first = sights[0]
    count = sum(sight.metric == first.metric for sight in sights)
    where = f"{count} in {first.metric}, {'the first ' * (count > 1)}at {_step_text(first.step)}"
    places = _first_place(curves, first.step)
    told = "".join(f" First {place.metric}, {place.text}." for place in places)
    return _finding("warning", "Loss spikes", f"{where}: {first.text}.{told}", [*places, *sights])


def _first_place(curves: Sequence[_PlacedCurve], step: int) -> list[Sight]:
    """Return which size of a layer rose first around a step, by step and then in the order of the model; if any."""
    sizes = [one for one in curves if one.place and _SIZES.search(one.statistic)]
    sizes.sort(key=lambda one: bool(_GRADIENT.search(one.group)))  # an activation is why a gradient is large
    near = [
        Sight(one.curve.name, event.step, f"{event.extreme / event.level:.3g} × before")
        for one in sizes
        for event in rises(one.curve, _PLACE)
        if step - _NEAR <= event.step <= _next_step(one.curve, step)
    ]
    return sorted(near, key=lambda sight: sight.step)[:1]


def _next_step(curve: Curve, step: int) -> int:
    """Return the first step of a curve from ``step`` on: layers are reported at intervals, the loss at every step."""
    at = int(np.searchsorted(curve.steps, step))
    return int(curve.steps[at]) if at < curve.steps.size else step


def _risen(curve: Curve, event: Event) -> Sight:
    times = event.extreme / event.level
    until = "to the end" if event.until is None else f"over by {_step_text(event.until)}"
    return Sight(curve.name, event.step, f"from {event.level:.3g} to {event.extreme:.3g}, ×{times:.3g}; {until}")


def _accuracy_falls(curves: Sequence[_PlacedCurve]) -> Iterator[dict[str, Any]]:
    sights = []
    for curve in (one.curve for one in _accuracies(curves)):
        largest = float(np.max(curve.values, initial=0.0, where=np.isfinite(curve.values)))
        for event in falls(curve, _FALL * (1.0 if largest <= 1.0 else 100.0)):  # beyond 1 it is in percent
            until = "to the end" if event.until is None else f"back at {_step_text(event.until)}"
            sights.append(Sight(curve.name, event.step, f"from {event.level:.3g} to {event.extreme:.3g}; {until}"))
    text = f"{{metrics}} at {_FALL:.0%} or more below the best before."
    yield from _finding("warning", "Accuracy falls", text, _by_step(sights))


def _risen_losses(curves: Sequence[_PlacedCurve]) -> Iterator[dict[str, Any]]:
    """Yield training losses that end far above their best; a loss of other data may, when a model overfits."""
    sights = []
    for curve in (one.curve for one in _losses(curves)):
        if not _NOT_TRAINED_ON.search(curve.name):
            event = end_above_best(curve, _ENDS_ABOVE, _ENDS_SMALL * first_level(curve))
            if event is not None:
                text = f"best {event.level:.3g}, in the end {event.extreme:.3g}"
                sights.append(Sight(curve.name, event.step, text))
    yield from _finding(
        "warning", "The loss rose", "It ends far above its best, which is where the link leads.", sights
    )


def _step_text(step: int) -> str:
    return "the start" if step < 0 else f"step {step:,}"


# -- what leaves its recent level -------------------------------------------------------------------------------------


FEWEST: Final = 8
"""A curve needs so many points before one of them can be judged."""
_LEVEL: Final = 5
"""The level of a curve is the median of so many points: short, so that it follows a curve that falls."""
_WINDOW: Final = 20
"""Noise is measured over so many points, or over what there is."""
_LOSS_WINDOW: Final = 64
"""The same of a loss. Of 100,000 normal losses 0 to 3 are then beyond six times the noise. Over 20 points it were 40:
so short a measure of noise is often too small, and the other rules need a rise that is larger by itself."""
_SIGMAS: Final = 6.0
"""Batches of the quiet recorded runs stay within 5 of their noise; see docs/report.md."""
_SETTLED: Final = 20
"""A curve that stays up for so many points has a new level."""
_LOSS_RISE: Final = 1.4
"""Times its recent level, of a loss: less does not matter, however small the noise."""
_PERPLEXITY: Final = 1.5
"""The same of the perplexity, if the loss is a cross entropy: 4.0 to 4.5 is 1.1 times the loss and 1.6 times that."""
_MOST_NATS: Final = 16.0
"""A larger loss is no cross entropy in nats: guessing among nine million classes is as much."""
_SMALL: Final = 0.02
"""Of the loss at the start: a smaller rise is that of a model that has learned."""

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Event:
    """One stretch of a curve that is out of line."""

    step: int
    """Where it begins."""
    level: float
    """What the curve was before."""
    extreme: float
    """How far it went."""
    until: int | None
    """The step at which it was back; None if it never was."""


def loss_spikes(curve: Curve, first: float) -> Iterator[Event]:
    """Yield the spikes of a loss, whose level at the start of the run was ``first``."""
    return rises(curve, _LOSS_RISE, least=_SMALL * first, nats=math.log(_PERPLEXITY), window=_LOSS_WINDOW)


def first_level(curve: Curve) -> float:
    """Return the level of a curve at its start, 0 if nothing is finite."""
    finite = _finite(curve)[0][:_LEVEL]
    return float(np.median(finite)) if finite.size else 0.0


def may_be_cross_entropy(loss: Curve) -> bool:
    """Return whether a loss may be a cross entropy in nats: never below zero, and at the start at most a guess."""
    return bool((_finite(loss)[0] >= 0).all()) and first_level(loss) < _MOST_NATS


def rises(
    curve: Curve, factor: float, *, least: float = 0.0, nats: float = math.inf, window: int = _WINDOW
) -> Iterator[Event]:
    """Yield where the curve rises to ``factor`` times its recent level or more, and by ``least`` or more.

    Recipe: ``[event.step for event in rises(curve, 5.0)]``. Only positive values are looked at. A rise by ``nats``
    matters too, whatever the factor, while the value may be a cross entropy. A curve that stays up has risen once.
    """
    values, steps = _finite(curve)
    positive = values > 0
    values, steps = values[positive], steps[positive]
    if values.size <= FEWEST:
        return
    logs = np.log(values)
    index = FEWEST
    for candidate in _candidates(values, factor, max(least, 0.0), nats):
        if candidate < index:
            continue
        level = float(np.median(logs[candidate - _LEVEL : candidate])) + _growth(logs[:candidate])
        rise = float(logs[candidate]) - level
        noise = _noise(logs[max(0, candidate - window) : candidate])
        if rise > _SIGMAS * noise and _matters(float(values[candidate]), math.exp(level), factor, least, nats):
            back = np.flatnonzero(logs[candidate:] < level + rise / 2)
            over = candidate + int(back[0]) if back.size else values.size
            peak = float(values[candidate:over].max())
            yield Event(int(steps[candidate]), math.exp(level), peak, int(steps[over]) if back.size else None)
            # What comes right after belongs to it; what stays is the new level.
            index = max(min(over, candidate + _SETTLED), candidate + _LEVEL)


def _matters(value: float, level: float, factor: float, least: float, nats: float) -> bool:
    is_large = value > factor * level or (value - level > nats and value < _MOST_NATS)
    return is_large and value - level > least


def _growth(logs: Values) -> float:
    """Return how much the level lags behind a curve that grows steadily, as gradients do when learning sets in."""
    steps = np.diff(logs[-_LEVEL - 1 :])
    return (_LEVEL + 1) / 2 * float(np.median(steps)) if (steps > 0).all() else 0.0


def _candidates(values: Values, factor: float, least: float, nats: float) -> Iterator[int]:
    """Yield the points that may be rises; a median of every window of every curve would take seconds."""
    lowest = np.lib.stride_tricks.sliding_window_view(values, _LEVEL)[:-1].min(axis=1)
    higher = values[_LEVEL:] - lowest
    high = ((values[_LEVEL:] > factor * lowest) | (higher > nats)) & (higher > least)
    yield from (int(at) + _LEVEL for at in np.flatnonzero(high))


def falls(curve: Curve, least: float) -> Iterator[Event]:
    """Yield where the curve falls by `least` or more below the best level it had, slowly or at once."""
    values, steps = _finite(curve)
    if values.size < 3:
        return
    best = _best_before(values)
    index = 0
    for candidate in np.flatnonzero(best - values >= least):
        if candidate < max(index, 3):
            continue
        level = float(best[candidate])
        noise = _noise(values[max(0, candidate - _WINDOW) : candidate])
        if level - values[candidate] > max(least, _SIGMAS * noise):
            back = np.flatnonzero(values[candidate:] > level - least / 2)
            index = int(candidate) + int(back[0]) if back.size else values.size
            lowest = float(values[candidate:index].min())
            yield Event(int(steps[candidate]), level, lowest, int(steps[index]) if back.size else None)


def _best_before(values: Values) -> Values:
    """Return the best level before each point; levels are medians of three, so that no single point is one."""
    levels = np.median(np.lib.stride_tricks.sliding_window_view(values, 3), axis=1)
    best = np.full(values.size, -np.inf)
    best[3:] = np.maximum.accumulate(levels)[:-1]
    return best


def end_above_best(curve: Curve, factor: float, least: float) -> Event | None:
    """Return the best moment of a curve that ends at `factor` times its best level, and `least` above it.

    Recipe: ``end_above_best(loss, 1.5, least=0.1)``; None for a curve that ends near its best.
    """
    values, steps = _finite(curve)
    if values.size <= FEWEST:
        return None
    size = max(_LEVEL, values.size // 20)  # of many points the lowest few are chance, so a level is of a twentieth
    levels = np.median(np.lib.stride_tricks.sliding_window_view(values, size), axis=1)
    lowest = int(levels.argmin())
    best, last = float(levels[lowest]), float(levels[-1])
    if last > factor * best and last - best > max(least, _noise(values[-_WINDOW:])):
        return Event(int(steps[lowest + size // 2]), best, last, None)
    return None


def _finite(curve: Curve) -> tuple[Values, NDArray[np.int64]]:
    finite = np.isfinite(curve.values)
    return curve.values[finite], curve.steps[finite]


def _noise(values: Values) -> float:
    """Return the standard deviation of a curve around its trend, by its median difference of neighbours."""
    if values.size < 3:
        return 0.0
    differences = np.diff(values)
    spread = np.median(np.abs(differences - np.median(differences)))
    return float(1.4826 * spread / np.sqrt(2))


class LossHistory:
    """Tell whether a loss begins a spike, by those before it.

    Recipe: ``history = LossHistory(); is_spike = history.add(2.31)``.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=2 * _LOSS_WINDOW)
        self._first: list[float] = []

    def add(self, loss: float | None) -> bool:
        """Add a loss; return whether it begins a spike."""
        if loss is None or not math.isfinite(loss):
            return False
        if len(self._first) < _LEVEL:
            self._first.append(loss)
        self._losses.append(loss)
        values = np.array(self._losses)
        lowest = values[-_LEVEL - 1 :].min()
        if loss < _LOSS_RISE * lowest and loss - lowest < math.log(_PERPLEXITY):
            return False  # no rise over any level; to find all rises takes thirty times as long
        curve = Curve("loss", np.arange(values.size), values)
        return any(event.step == values.size - 1 for event in loss_spikes(curve, float(np.median(self._first))))
