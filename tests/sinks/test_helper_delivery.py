"""One slow sink on its way through a log, in this process, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers_sinks import delivered, record

from hookline.records.delivery import BATCH, Delivery, read_position
from hookline.records.log import RecordLog


def spec(out: Path, **options: Any) -> dict[str, Any]:
    """What the helper process is told of a sink."""
    return {
        "name": "Slow",
        "module": "helpers_sinks",
        "class": "Slow",
        "file": None,
        "options": {"path": str(out), **options},
    }


def values(out: Path) -> list[Any]:
    """What has arrived."""
    return [line["x"] for line in delivered(out) if "x" in line]


def test_a_log_that_is_cut_and_has_grown_again_meanwhile_is_found_out(tmp_path):
    """Its length alone does not tell: the place where reading stopped is now in the middle of another record."""
    log, out, said = RecordLog(tmp_path / "r.jsonl"), tmp_path / "slow.txt", []
    delivery = Delivery(spec(out), log.path, said.append)
    for number in range(3):
        log.append(record(number))
    state = log.state_dict()
    for number in range(3, 5):
        log.append(record(number, x=number, another="longer than the next ones" * 9))
    assert delivery.advance()
    assert values(out) == [0, 1, 2, 3, 4]
    size = log.path.stat().st_size
    log.load_state_dict(state)
    for number in range(3, 12):
        log.append(record(number))
    assert log.path.stat().st_size > size
    while delivery.advance():
        pass
    assert values(out) == list(range(12))
    assert delivery.is_done()
    assert said == []


def test_records_that_a_sink_has_had_are_passed_over_however_many(tmp_path):
    """In one go, and the contexts among them count as one."""
    log, out = RecordLog(tmp_path / "r.jsonl"), tmp_path / "slow.txt"
    log.append_context({"strategy": "a", "seed": 1})
    for number in range(3 * BATCH):
        log.append(record(number))
    first = Delivery(spec(out), log.path, print)
    while first.advance():
        pass
    out.unlink()
    log.append_context({"strategy": "b"})
    log.append(record(3 * BATCH))
    second = Delivery(spec(out), log.path, print)
    assert second.position == 3 * BATCH
    assert second.advance()
    assert delivered(out)[0] == {"context": {"strategy": "b", "seed": 1}}
    assert values(out) == [3 * BATCH]
    assert read_position(log.path, "Slow") == 3 * BATCH + 1
    assert second.close()


def test_half_a_line_is_waited_for(tmp_path):
    """And does not count as something that is missing."""
    log, out = RecordLog(tmp_path / "r.jsonl"), tmp_path / "slow.txt"
    log.append(record(0))
    log.append(record(1))
    log.close()
    whole = log.path.read_bytes()
    log.path.write_bytes(whole[:-10])
    delivery = Delivery(spec(out), log.path, print)
    assert delivery.advance()
    assert values(out) == [0]
    assert delivery.is_done()
    log.path.write_bytes(whole)
    assert not delivery.is_done()
    assert delivery.advance()
    assert values(out) == [0, 1]


def test_a_sink_that_is_down_is_tried_ever_later_and_at_once_when_hurried(tmp_path):
    """Nothing is asked of it meanwhile."""
    log, out, said = RecordLog(tmp_path / "r.jsonl"), tmp_path / "slow.txt", []
    down, tries = tmp_path / "slow.txt.down", tmp_path / "slow.txt.tries"
    down.write_text("OSError")
    log.append(record(0))
    delivery = Delivery(spec(out), log.path, said.append)
    for _ in range(50):
        assert not delivery.advance()
    assert tries.read_text() == "x"
    delivery.back_off.hurry()
    assert not delivery.advance()
    assert tries.read_text() == "xx"
    assert said == [{"failed": "Slow", "what": "take metrics", "error": "OSError: nobody there"}] * 2
    down.unlink()
    delivery.back_off.hurry()
    assert delivery.advance()
    assert values(out) == [0]
