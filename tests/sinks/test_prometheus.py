"""The newest metrics on a port."""

from __future__ import annotations

import math
import urllib.error
import urllib.request

import pytest
from helpers_waiting import PATIENCE
from prometheus_client.parser import text_string_to_metric_families

from hookline.errors import OptionError
from hookline.records.sink import Record, StepSeries
from hookline.sinks.prometheus_sink import PrometheusSink
from hookline.when import HookPoint


@pytest.fixture
def sink():
    sink = PrometheusSink()
    yield sink
    sink.close()


def fetch(sink: PrometheusSink) -> dict[tuple[str, ...], float]:
    """By gauge, metric, strategy, rank and point, as the official parser reads it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=PATIENCE) as answer:
        text = answer.read().decode("utf-8")
    families = list(text_string_to_metric_families(text))
    assert {family.type for family in families} <= {"gauge"}
    return {
        (sample.name, *(sample.labels[key] for key in ("metric", "strategy", "rank", "hook_point"))): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_newest_values_are_served_with_labels(sink):
    """Of step metrics the last one; and how far the run is."""
    sink.write(Record({"train/loss": StepSeries([0.5, 0.25], [0, 1])}, 0, HookPoint.POST_STEP, 1, "random", 2))
    sink.write(Record({"train/loss": StepSeries([0.125], [2]), "eval/a.b": 1}, 1, HookPoint.POST_STEP, 2, "random", 2))
    where = ("random", "2", "POST_STEP")
    assert fetch(sink) == {
        ("hookline_train_loss", "train/loss", *where): 0.125,
        ("hookline_eval_a_b", "eval/a.b", *where): 1.0,
        ("hookline_step", "step", "random", "2", ""): 2.0,
        ("hookline_epoch", "epoch", "random", "2", ""): 1.0,
    }
    sink.write(Record({}, None, HookPoint.SNAPSHOT, 3, "random", 2))  # of a run that counts steps
    progress = {name: value for (name, *_, point), value in fetch(sink).items() if not point}
    assert progress == {"hookline_step": 3.0}


def test_every_kind_of_value_has_its_gauges_or_none(sink):
    """Lists as three numbers, text and None as nothing; names that look alike are told apart by their label."""
    metrics = {
        "a/b": 1, "a.b": 2, "list": [1, 2, 6], "text": "x", "none": None, "dict": {"x": True}, "nan": math.nan,
        "inf": math.inf, "huge": -(10**400), "empty": [], "mixed": ["x", 1], "epoch": 99, 'größe "💥"\n\\': 3.0,
    }  # fmt: skip
    sink.emit(metrics, 7, "SNAPSHOT")
    found = {(name, metric): value for (name, metric, *_), value in fetch(sink).items()}
    assert math.isnan(found.pop(("hookline_nan", "nan")))
    assert found == {
        ("hookline_a_b", "a/b"): 1.0,
        ("hookline_a_b", "a.b"): 2.0,
        ("hookline_list_mean", "list_mean"): 3.0,
        ("hookline_list_min", "list_min"): 1.0,
        ("hookline_list_max", "list_max"): 6.0,
        ("hookline_dict_x", "dict/x"): 1.0,
        ("hookline_inf", "inf"): math.inf,
        ("hookline_huge", "huge"): -math.inf,
        ("hookline_metric_epoch", "metric/epoch"): 99.0,
        ("hookline_gr__e______", 'größe "💥"\n\\'): 3.0,
        ("hookline_step", "step"): 7.0,
        ("hookline_epoch", "epoch"): 7.0,
    }


def test_gauges_of_another_strategy_go(sink):
    """Else their last values would look like news."""
    sink.set_run_context(strategy="random")
    sink.emit({"a": 1}, 0, "SNAPSHOT")
    assert ("hookline_a", "a", "random", "0", "SNAPSHOT") in fetch(sink)
    sink.set_run_context(strategy="sorted")
    assert fetch(sink) == {}


def test_nothing_listens_before_the_run_and_after_it():
    """It begins with the first context or record, and the port is free again when it is closed."""
    sink = PrometheusSink()
    assert sink.port is None
    sink.emit({}, 0, "SNAPSHOT")
    assert sink.port is None
    sink.set_run_context(strategy="any")
    port = sink.port
    assert port
    assert sink.start() == port
    sink.close()
    sink.close()
    assert sink.port is None
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE)
    again = PrometheusSink(port)
    assert again.start() == port
    again.close()


def test_a_port_that_is_taken_says_what_to_do(sink):
    """And one that does not exist."""
    taken = sink.start()
    with pytest.raises(OptionError, match=rf"cannot listen at 127\.0\.0\.1:{taken} .* port=0 takes one that is free"):
        PrometheusSink(taken).start()
    with pytest.raises(OptionError, match="cannot listen at"):
        PrometheusSink(99999).start()
