"""What is found wrong, and what is left alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hookline.report.anomalies import find_anomalies
from hookline.report.families import places
from hookline.report.series import Curve, Series


def _found(facts: dict[str, Any] | None = None, /, **curves: ArrayLike) -> dict[str, dict[str, Any]]:
    """By title; names of curves have __ for a slash."""
    named = {name.replace("__", "/"): np.asarray(values, dtype=float) for name, values in curves.items()}
    series = Series([Curve(name, np.arange(values.size), values) for name, values in named.items()])
    found = find_anomalies(facts or {}, series, places(named))
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
    """A spike of several steps is one; a slow rise is none; other metrics may jump."""
    loss = [1.0] * 30 + [5.0] * 3 + [1.0] * 30 + [4.0] + [1.0] * 5
    finding = _found(train__loss=loss, h__count=loss)["Loss spikes"]
    assert [(s["metric"], s["step"]) for s in finding["sights"]] == [("train/loss", 30), ("train/loss", 63)]
    assert _found(train__loss=np.linspace(1, 20, 200)) == {}
    low = [2.0] * 20 + [0.01] * 30  # batches of a model that has learned: a fifth of the first loss is no spike
    assert _found(train__loss=[*low, 0.4, *low[20:]]) == {}
    assert "Loss spikes" in _found(train__loss=[*low, 0.6, *low[20:]])


def test_the_run_itself_is_looked_at() -> None:
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
