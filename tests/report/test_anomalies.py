"""What is found wrong, and what is left alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike
from recorded import FACTS, recorded_runs

from hookline.report.anomalies import count_judged, find_anomalies, tell_findings
from hookline.report.metric_series import Curve, RunSeries, layer_places


def _found(facts: dict[str, Any] | None = None, /, **curves: ArrayLike) -> dict[str, dict[str, Any]]:
    """By title; names of curves have __ for a slash."""
    named = {name.replace("__", "/"): np.asarray(values, dtype=float) for name, values in curves.items()}
    series = RunSeries([Curve(name, np.arange(values.size), values) for name, values in named.items()])
    found = find_anomalies(facts or {}, series, layer_places(named))
    levels = [("error", "warning", "notice").index(finding["level"]) for finding in found]
    assert levels == sorted(levels)
    return {finding["title"]: finding for finding in found}


def test_a_healthy_run_has_none() -> None:
    """A falling noisy loss, norms that double, half of the units zero, new biases: nothing is said."""
    random = np.random.default_rng(0)
    loss = 3 * np.exp(-np.arange(500) / 100) + 0.1 + 0.05 * random.standard_normal(500)
    curves: dict[str, Any] = {"train__loss": loss, "w__fc__forward__norm": np.linspace(1, 2, 500)}
    curves |= {"w__fc__forward__zero_fraction": np.full(500, 0.5), "w__fc__param__zero_fraction": np.ones(500)}
    curves |= {f"w__{n}__backward__norm": 10.0**-n * np.ones(500) for n in range(4)}
    assert _found({"status": "finished", "hooks": {"w": {"fired": 3}}}, **curves) == {}


def test_nan_and_inf_are_listed_from_the_first_on() -> None:
    """By step; a counter of them counts, too."""
    finding = _found(a__x=[1, 2, math.inf, 3], a__y=[1, math.nan, math.nan, 1], w__fc__forward__nan=[0, 0, 0, 6])[
        "NaN or Inf"
    ]
    assert [(s["metric"], s["step"]) for s in finding["sights"]] == [("a/y", 1), ("a/x", 2), ("w/fc/forward/nan", 3)]
    assert "First at step 1, in a/y; 3 metrics" in finding["text"]
    assert finding["sights"][0]["text"] == "NaN, 2 of 4 points"
    assert "too far apart to say which layer was first" in finding["text"]
    assert "The hook first_bad_operation finds" in finding["text"]
    with_hook = _found({"hooks": {"first_bad_operation": {"fired": 4}}}, a__x=[1, math.nan])["NaN or Inf"]
    assert "not known" not in with_hook["text"]


def test_units_are_dead_that_stay_so_to_the_end() -> None:
    """From when on; one that came back is alive; of parameters nothing is said."""
    dead, back = [0.2] * 5 + [1.0] * 5, [1.0] * 9 + [0.3]
    finding = _found(
        w__a__forward__zero_fraction=dead, w__b__forward__zero_fraction=back, w__c__param__zero_fraction=dead
    )["Dead units"]
    assert [(s["metric"], s["step"]) for s in finding["sights"]] == [("w/a/forward/zero_fraction", 5)]


def test_dead_units_are_one_finding_activations_first() -> None:
    """Gradients that are zero because of them come after; what is saturated is another matter."""
    found = _found(
        w__a__backward__zero_fraction=[1.0] * 3, w__b__forward__zero_fraction=[1.0] * 3, h__saturated_fraction=[1.0] * 3
    )  # fmt: skip
    assert list(found) == ["Dead units", "Saturated units"]
    metrics = [sight["metric"] for sight in found["Dead units"]["sights"]]
    assert metrics == ["w/b/forward/zero_fraction", "w/a/backward/zero_fraction"]


def test_norms_explode_beyond_a_hundred_times_their_median() -> None:
    """Ninety times is large, not broken; neither is anything after it started at zero."""
    base = [1.0] * 10
    finding = _found(w__a__forward__norm=[*base, 101.0], w__b__forward__norm=[*base, 90.0], h__grad_norm=[*base, 1e9])[
        "Exploding norms"
    ]
    assert {s["metric"] for s in finding["sights"]} == {"w/a/forward/norm", "h/grad_norm"}
    assert {s["step"] for s in finding["sights"]} == {10}
    assert _found(w__a__forward__norm=[0.0] * 10 + [5.0]) == {}


def test_gradients_vanish_beside_those_of_other_layers() -> None:
    """Below a millionth of the largest; activations may be small."""
    small, large = [1e-8] * 10, [1.0] * 10
    finding = _found(w__a__backward__norm=small, w__b__backward__norm=large)["Vanishing gradients"]
    assert [s["metric"] for s in finding["sights"]] == ["w/a/backward/norm"]
    assert _found(w__a__forward__norm=small, w__b__forward__norm=large) == {}
    assert _found(w__a__backward__norm=small, w__b__backward__norm=small) == {}


def test_a_loss_spikes_when_it_leaves_what_it_was() -> None:
    """By what it was just before, however small that is; a spike of several steps is one; other metrics may jump."""
    loss = [1.0] * 30 + [5.0] * 3 + [1.0] * 30 + [4.0] + [1.0] * 5
    finding = _found(train__loss=loss, h__count=loss)["Loss spikes"]
    assert [(s["metric"], s["step"]) for s in finding["sights"]] == [("train/loss", 30), ("train/loss", 63)]
    assert finding["sights"][0]["text"] == "from 1 to 5, ×5; over by step 33"
    low = [4.0] * 20 + [0.003] * 30  # a model that has learned
    assert "Loss spikes" in _found(train__loss=[*low, 0.15, 0.2, 0.1, *low[20:]])
    assert _found(train__loss=[*low, 0.03, *low[20:]]) == {}  # tenfold, and below a hundredth of the first loss
    assert "Loss spikes" not in _found(train__loss=np.linspace(1, 20, 200))


def test_noise_is_no_spike_and_a_spike_in_noise_is() -> None:
    """Losses of batches differ by a factor of ten in good health; what is beyond their own spread is told."""
    random = np.random.default_rng(0)
    loss = 0.05 * np.exp(0.6 * random.standard_normal(600))
    assert loss.max() > 3 * np.median(loss)  # control: a fixed factor would cry wolf
    assert _found(train__loss=loss) == {}
    loss[400] = 5.0
    assert [s["step"] for s in _found(train__loss=loss)["Loss spikes"]["sights"]] == [400]


def test_a_loss_of_a_language_model_spikes_by_its_noise_and_its_perplexity() -> None:
    """Twice a loss of 2, or half a nat above 4, is far from a noise of 0.03; a loss that stays up has risen once."""
    noise = 0.03 * np.random.default_rng(0).standard_normal(400)
    for level, peak in ((2.04, 4.18), (4.0, 4.5)):
        loss = level + noise
        loss[300] = peak
        assert [s["step"] for s in _found(train__loss=loss)["Loss spikes"]["sights"]] == [300]
    assert _found(train__loss=540 + 20 * noise) == {}
    loss = 2 + noise
    loss[200:] += 2
    loss[320] = 9.0
    sights = _found(train__loss=loss)["Loss spikes"]["sights"]
    assert [s["step"] for s in sights] == [200, 320]
    assert sights[0]["text"].endswith("to the end")


def test_a_gradient_spikes_by_its_name_or_by_what_its_hook_says_of_it() -> None:
    """Five times its recent level; of the norm of weights nothing is said."""
    values = [*[1.0] * 20, 8.0, 7.0, *[1.0] * 9]
    facts = {"hooks": {"norms": {"fired": 1, "metrics": [{"name": "total_norm", "description": "of the gradient"}]}}}
    found = _found(facts, h__grad_norm_max=values, norms__total_norm=values, w__weight_norm=values)
    assert {s["metric"] for s in found["Gradient spikes"]["sights"]} == {"h/grad_norm_max", "norms/total_norm"}
    assert {
        s["metric"] for s in _found(h__grad_norm=values, norms__total_norm=values)["Gradient spikes"]["sights"]
    } == {"h/grad_norm"}
    assert _found(h__grad_norm=[*[1.0] * 20, 4.0, *[1.0] * 9]) == {}
    assert _found(h__grad_norm=0.05 * 1.7 ** np.arange(9)) == {}  # steady growth, as when learning sets in


def test_an_accuracy_falls_at_once_or_slowly() -> None:
    """Five hundredths below its best, in shares or in percents; one that wavers as much before has not fallen."""
    rising = np.linspace(0.5, 0.98, 40)
    fallen = [*rising, 0.90, 0.84, 0.86, 0.95, 0.97, 0.98]
    (sight,) = _found(eval__val_acc=fallen)["Accuracy falls"]["sights"]
    assert (sight["step"], sight["text"]) == (40, "from 0.968 to 0.84; back at step 43")
    assert "Accuracy falls" in _found(eval__accuracy=100 * np.asarray(fallen))
    slowly = _found(eval__top1=[*rising, *np.linspace(0.98, 0.7, 60)])["Accuracy falls"]
    assert slowly["sights"][0]["text"].endswith("to the end")
    assert _found(eval__val_acc=[*rising, 0.95, 0.94, 0.96]) == {}
    assert _found(eval__val_acc=0.6 + 0.1 * np.random.default_rng(0).standard_normal(60)) == {}
    assert _found(h__accurate=fallen) == {}


def test_a_training_loss_that_ends_far_above_its_best_has_risen() -> None:
    """However slowly; the loss of other data may rise, when a model learns by heart."""
    slow = [*np.linspace(2, 1, 100), *np.linspace(1, 4, 200)]
    (sight,) = _found(train__loss=slow)["The loss rose"]["sights"]
    assert sight["text"] == "best 1.04, in the end 3.89"
    assert _found(eval__val_loss=slow, eval__loss=slow, initial__loss=slow, val__loss=slow) == {}
    assert _found(train__loss=[*np.linspace(2, 1, 100), *np.linspace(1, 1.4, 100)]) == {}


def test_a_bias_in_front_of_a_normalization_has_not_vanished() -> None:
    """Its gradient is zero by nature while its weight learns; a layer whose weight is small as well is told of."""
    small, large = [1e-9] * 10, [1.0] * 10
    names = ("a.weight", "a.bias", "b.weight", "b.bias")
    curves = dict(zip((f"w/{name}/param_grad/norm" for name in names), (large, small, small, small), strict=True))
    finding = _found(**{name.replace("/", "__"): values for name, values in curves.items()})["Vanishing gradients"]
    assert [s["metric"] for s in finding["sights"]] == ["w/b.weight/param_grad/norm", "w/b.bias/param_grad/norm"]


@pytest.mark.parametrize(
    ("curves", "why"),
    [
        ({}, "nothing was"),
        ({"h/x": 30}, "no loss"),
        ({"train/loss": 1}, "has 1 point,"),
        ({"train/loss": 8}, "8 points"),
    ],
)
def test_what_could_not_be_judged_is_said_with_its_reason(curves: dict[str, int], why: str) -> None:
    """And never that nothing was unusual."""
    series = RunSeries([Curve(name, np.arange(size), np.ones(size)) for name, size in curves.items()])
    (line,) = tell_findings([], count_judged({}, series, {}))
    assert line.startswith("Could not judge")
    assert why in line


def test_a_loss_spike_names_the_first_layer_that_rose_with_it() -> None:
    """Not later, an activation before gradients, by the order of the model; findings are lines for a terminal too."""
    loss, size = 2 + 0.02 * np.sin(np.arange(60.0)), np.ones(60)
    loss[40] = 4.0
    risen = np.where(np.arange(60) == 40, 624.0, size)
    late = np.where(np.arange(60) == 41, 900.0, size)
    curves = {"h__in__forward__std": late, "h__in__backward__norm": risen}
    curves |= {"h__feat__forward__std": risen, "h__head__forward__std": risen}
    finding = _found(train__loss=loss, h__stem__forward__std=size, **curves)["Loss spikes"]
    assert "First h/feat/forward/std, 624 × before" in finding["text"]
    assert finding["sights"][0]["metric"] == "h/feat/forward/std"
    (line,) = tell_findings([finding], {"kinds": [["loss", 1]], "why": ""})
    assert line.startswith("Loss spikes: 1 in train/loss, at step 40: from 1.9")


@pytest.fixture(scope="module")
def recorded() -> dict[str, tuple[RunSeries, dict[str, dict[str, Any]]]]:
    """Real runs by name, each with what is found in it."""
    found = {}
    for name, series in recorded_runs().items():
        where = layer_places(curve.name for curve in series.curves)
        found[name] = series, {finding["title"]: finding for finding in find_anomalies(FACTS, series, where)}
    return found


Recorded = dict[str, tuple[RunSeries, dict[str, dict[str, Any]]]]


def test_recorded_runs_are_quiet_or_ill_by_their_accuracy(recorded: Recorded) -> None:
    """Control of the two tests below: twelve never lost more than 0.02, six did, and no rule had a say in it."""
    lost = {}
    for name, (series, _) in recorded.items():
        (accuracy,) = (curve.values for curve in series.curves if curve.name == "eval/val_acc")
        lost[name] = float((np.maximum.accumulate(accuracy) - accuracy).max())
    assert sorted(name for name, fall in lost.items() if fall <= 0.02) == sorted(
        name for name in recorded if name.startswith("quiet")
    )
    assert len(recorded) == 18
    assert sum(name.startswith("quiet") for name in recorded) == 12


def test_no_rule_cries_wolf_in_a_quiet_run(recorded: Recorded) -> None:
    """No finding in twelve real runs, of which each rule could judge a loss, an accuracy and gradient norms."""
    quiet = {name: found for name, found in recorded.items() if name.startswith("quiet")}
    assert {name: list(findings) for name, (_, findings) in quiet.items() if findings} == {}
    for series, _ in quiet.values():
        counts = dict(count_judged(FACTS, series, layer_places(curve.name for curve in series.curves))["kinds"])
        assert counts["loss"] >= 2
        assert counts["accuracy"] >= 1
        assert counts["gradient norm"] >= 15


@pytest.mark.parametrize(
    ("run", "titles"),
    [
        ("ill_mod_199", {"Loss spikes", "Accuracy falls", "Gradient spikes"}),  # the default run
        ("ill_mod_2", {"Loss spikes", "Accuracy falls", "Gradient spikes"}),
        ("ill_mod_3", {"Loss spikes", "Accuracy falls", "Gradient spikes"}),
        ("ill_fast_mod_1", {"Loss spikes", "Accuracy falls", "Gradient spikes", "The loss rose"}),
        ("ill_fast_digits_1", {"Loss spikes", "Accuracy falls", "Dead units"}),
        ("ill_fast_digits_2", {"Accuracy falls", "Gradient spikes"}),
    ],
)
def test_what_went_wrong_in_an_ill_run_is_found(recorded: Recorded, run: str, titles: set[str]) -> None:
    """By these rules and no others: the numbers of docs/report.md."""
    assert set(recorded[run][1]) == titles


@pytest.mark.parametrize(
    ("run", "times"),
    [
        ("quiet_mod_1", 1.5),
        ("quiet_mod_4", 1.7),
        ("quiet_fast_mod_2", 1.9),
        ("quiet_slow_mod_1", 2.1),
        ("quiet_slow_mod_2", 2.3),
        ("quiet_slow_mod_3", 2.5),
    ],
)
def test_a_spike_of_less_than_three_times_is_found_in_a_recorded_loss(
    recorded: Recorded, run: str, times: float
) -> None:
    """One value of a quiet run is raised, where the loss begins to fall: that step is told, and no other."""
    (curve,) = (each for each in recorded[run][0].curves if each.name == "training_metrics/loss")
    values = curve.values.copy()
    at = max(9, int(np.flatnonzero(values < 0.93 * values[0])[0]))
    values[at] *= times
    (finding,) = find_anomalies({}, RunSeries([Curve(curve.name, curve.steps, values)]), {})
    assert [(finding["title"], sight["step"]) for sight in finding["sights"]] == [("Loss spikes", curve.steps[at])]


def test_the_default_run_is_told_where_it_became_unstable(recorded: Recorded) -> None:
    """Epoch 77: the losses, the accuracies and the norm of the gradient, with how far they went."""
    findings = recorded["ill_mod_199"][1]
    told = {sight["metric"]: sight for finding in findings.values() for sight in finding["sights"]}
    assert told["eval/val_acc"]["text"] == "from 0.977 to 0.84; back at step 755"
    for metric in ("eval/train_loss", "eval/val_loss", "eval/val_acc", "norms/total_norm"):
        assert told[metric]["step"] == 701
    assert "×3" in told["training_diagnostics/grad_norm_mean"]["text"]


def test_the_run_itself_is_count_judged() -> None:
    """That it failed, that a sink did, that a hook never fired."""
    facts = {
        "status": "failed",
        "error": "ValueError: no",
        "sink_errors": {"WandbSink": 3},
        "hooks": {"h": {"fired": 0}},
    }
    found = _found(facts)
    assert found["The run failed"]["text"] == "ValueError: no"
    assert "3 times" in found["WandbSink could not write"]["text"]
    assert "Hooks that never fired" not in found  # it may have been due later
    assert "h:" in _found({**facts, "status": "finished"})["Hooks that never fired"]["text"]


def test_many_of_a_kind_are_one_finding_with_the_rest_counted() -> None:
    """Of 80 layers, 50 have links."""
    finding = _found(**{f"w__{n}__forward__mean": [math.nan] for n in range(80)})["NaN or Inf"]
    assert len(finding["sights"]) == 50
    assert finding["more"] == 30
