"""Metrics kept in memory."""

from __future__ import annotations

import hookline as hl


def test_records_are_kept_in_order_with_their_moment_and_context():
    """And without aliasing what was handed in."""
    sink = hl.sinks.MemorySink()
    sink.set_run_context(strategy="shuffled")
    metrics = {"norms/total": 1.0}
    sink.emit(metrics, 0, "POST_EPOCH")
    metrics["norms/total"] = 9.0
    sink.set_run_context(strategy="sorted")
    sink.emit({"norms/total": 2.0, "loss": 0.5}, 1, "POST_EPOCH")
    sink.flush()
    assert sink.series("norms/total") == [(0, 1.0), (1, 2.0)]
    assert sink.latest == {"norms/total": 2.0, "loss": 0.5}
    assert [record.context for record in sink.records] == [{"strategy": "shuffled"}, {"strategy": "sorted"}]
    assert sink.records[1].hook_point == "POST_EPOCH"


def test_a_sink_of_ones_own_needs_emit_alone():
    """The rest of the protocol does nothing by default."""

    class Printer(hl.MetricSink):
        def emit(self, metrics, epoch, hook_point):
            seen.append(metrics)

    seen: list[object] = []
    sink = Printer()
    sink.set_run_context(strategy="any")
    sink.emit({"a": 1}, 0, None)
    sink.flush()
    assert seen == [{"a": 1}]
