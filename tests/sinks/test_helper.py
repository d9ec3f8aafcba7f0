"""Slow sinks in a process of their own, which reads the log."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from helpers_sinks import Slow, delivered, record
from helpers_waiting import until

from hookline.errors import HooklineWarning, OptionError
from hookline.records.log import FanOut, Log, read_log
from hookline.records.sink import MetricSink, Record


def numbers(path: Path) -> list[int]:
    """The numbers of the records that have arrived, in order."""
    return [line["n"] for line in delivered(path) if "n" in line]


def position(log: Path) -> int:
    """How many records have arrived for good, as it stands beside the log."""
    return Log(log).kept("Slow").get("number", 0)


def process_of(fan_out: FanOut) -> subprocess.Popen[bytes]:
    """The helper process."""
    return fan_out._helper._process


def test_a_slow_sink_gets_everything_in_order_elsewhere_and_without_torch(tmp_path):
    """Contexts in their places; it is closed at the end, and what it prints goes to a file beside the log."""
    out = tmp_path / "slow.txt"
    with FanOut([Slow(str(out))], log=tmp_path / "records.jsonl") as fan_out:
        fan_out.set_run_context(strategy="a")
        fan_out.write(record(0))
        fan_out.set_run_context({"strategy": "b"})
        fan_out.write(record(1, x=float("nan")))
        until(lambda: numbers(out) == [0, 1])
    lines = delivered(out)
    assert [next(iter(line)) for line in lines] == ["context", "n", "context", "n", "closed"]
    assert [line["context"] for line in lines if "context" in line] == [{"strategy": "a"}, {"strategy": "b"}]
    assert lines[3]["x"] != lines[3]["x"]
    assert lines[-1]["torch"] is False
    assert lines[-1]["closed"] != os.getpid()
    assert fan_out.errors == {}
    assert b"this goes to the file" in (tmp_path / ".helper.log").read_bytes()


def test_without_a_log_slow_sinks_read_a_temporary_one_which_goes_when_all_has_arrived(tmp_path):
    """Folder and all."""
    out = tmp_path / "slow.txt"
    with FanOut([Slow(str(out))]) as fan_out:
        log = fan_out.log
        fan_out.write(record(0))
        assert log is not None
        assert log.exists()
    assert numbers(out) == [0]
    assert not log.parent.exists()


def test_a_sink_whose_host_is_gone_for_a_while_loses_nothing_and_keeps_the_order(tmp_path):
    """Failures are told once and counted; the other sink is not held up."""
    out, other, down = tmp_path / "slow.txt", tmp_path / "other.txt", tmp_path / "slow.txt.down"
    down.touch()
    fan_out = FanOut([Slow(str(out)), Slow(str(other))], log=tmp_path / "records.jsonl")
    for number in range(10):
        fan_out.write(record(number))
    tries = tmp_path / "slow.txt.tries"
    until(lambda: tries.exists() and len(tries.read_text()) >= 3 and len(numbers(other)) == 10)
    assert numbers(out) == []
    down.unlink()
    fan_out.close()
    assert numbers(out) == list(range(10))
    assert fan_out.errors["Slow"] >= 3
    assert "Slow 2" not in fan_out.errors
    with pytest.warns(HooklineWarning) as caught:
        fan_out.warn_pending()
    assert len(caught) == 1
    assert "OSError: nobody there" in str(caught[0].message)


def test_closing_gives_up_in_time_and_says_who_is_behind_and_what_to_do(tmp_path):
    """Nothing is lost: the next run has it delivered."""
    out, down = tmp_path / "slow.txt", tmp_path / "slow.txt.down"
    down.touch()
    fan_out = FanOut([Slow(str(out))], log=tmp_path / "records.jsonl", patience=1.0)
    for number in range(3):
        fan_out.write(record(number))
    fan_out.close()
    with pytest.warns(HooklineWarning) as caught:
        fan_out.warn_pending()
    said = " ".join(str(one.message) for one in caught)
    assert "Slow by 3" in said
    assert "hookline replay" in said
    down.unlink()
    fan_out.write(record(3))
    fan_out.close()
    assert numbers(out) == [0, 1, 2, 3]


def test_a_helper_that_is_killed_at_any_moment_repeats_a_batch_at_most(tmp_path):
    """At least once, in order: after a kill it goes back, but not past what it had noted."""
    out = tmp_path / "slow.txt"
    log = tmp_path / "records.jsonl"
    fan_out = FanOut([Slow(str(out), delay=0.001)], log=log)
    for number in range(1200):
        fan_out.write(record(number))
    until(lambda: position(log) > 0)
    process_of(fan_out).kill()
    noted = position(log)
    fan_out.close()
    found = numbers(out)
    assert sorted(set(found)) == list(range(1200))
    back = [later for earlier, later in pairwise(found) if later != earlier + 1]
    assert all(later >= noted for later in back)
    assert len(back) <= 1
    with pytest.warns(HooklineWarning):
        fan_out.warn_pending()


RUN = """
import sys, time
sys.path.insert(0, {here!r})
from helpers_sinks import Slow, record
from hookline.records.log import FanOut
fan_out = FanOut([Slow({out!r}, delay=0.002)], log={log!r})
for number in range(300):
    fan_out.write(record(number))
print(fan_out._helper._process.pid, flush=True)
time.sleep(60)
"""


def is_gone(pid: int) -> bool:
    """Whether there is no such process, or only its name is left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_when_the_run_is_killed_its_helper_delivers_the_rest_and_ends(tmp_path, number):
    """Everything that was written before, in order; Ctrl-C goes to the whole group, and does not reach the helper."""
    out, log = tmp_path / "slow.txt", tmp_path / "r.jsonl"
    code = RUN.format(here=str(Path(__file__).parents[1]), out=str(out), log=str(log))
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    helper = int(run.stdout.readline())
    os.killpg(run.pid, number)
    run.communicate()
    assert run.returncode != 0
    until(lambda: is_gone(helper))
    assert numbers(out) == list(range(300))
    assert position(log) == 300


def test_a_log_that_is_cut_back_delivers_nothing_again(tmp_path):
    """While the helper reads it, and in a resumed run: numbers below the position are passed over.

    A log that was removed and begun anew is another one: nothing of it is passed over.
    """
    out, log = tmp_path / "slow.txt", tmp_path / "records.jsonl"
    first = FanOut([Slow(str(out))], log=log)
    first.set_run_context(strategy="a")
    for number in range(3):
        first.write(record(number))
    state = json.loads(json.dumps(first.state_dict()))
    for number in range(3, 5):
        first.write(record(number))
    until(lambda: position(log) == 5)
    first.load_state_dict(state)
    for number in range(3, 7):
        first.write(record(number))
    first.close()
    assert numbers(out) == list(range(7))
    second = FanOut([Slow(str(out))], log=log)
    second.set_run_context(strategy="a")
    second.load_state_dict(state)
    for number in range(3, 10):
        second.write(record(number))
    second.close()
    assert numbers(out) == list(range(10))
    assert [found.number for found in read_log(log) if isinstance(found, Record)] == list(range(10))
    assert second.errors == {}
    log.unlink()
    assert (tmp_path / ".Slow.position").exists()
    with FanOut([Slow(str(out))], log=log) as third:
        third.write(record(7))
    assert [line["x"] for line in delivered(out) if "x" in line] == [*range(10), 7]


class Unspoken(MetricSink):
    """A slow sink that does not say what it is made of."""

    slow = True

    def __init__(self, options=None) -> None:
        self.seen: list[object] = []
        self._options = options

    def emit(self, metrics, epoch, hook_point) -> None:
        self.seen.append(metrics)

    def options(self):
        return super().options() if self._options is None else self._options


class Inside:
    """Holds a class that cannot be imported by its name."""

    def __init__(self) -> None:
        class Hidden(Unspoken):
            pass

        self.sink = Hidden({})


@pytest.mark.parametrize(
    ("sink", "words"),
    [(Unspoken(), r"options\(\)"), (Unspoken({"key": object()}), "no JSON"), (Inside().sink, "cannot be imported")],
)
def test_a_slow_sink_that_cannot_be_made_elsewhere_is_refused_before_the_run(sink, words):
    """Without options, with options that are no JSON, or a class that cannot be imported."""
    with pytest.raises(OptionError, match=words):
        FanOut([sink])


def test_who_does_not_want_to_wait_loses_nothing(tmp_path, monkeypatch):
    """Ctrl-C while slow sinks are waited for: everything else is closed by then, and the process goes on by itself."""
    slow = tmp_path / "slow.txt"
    memory = Closing()
    fan_out = FanOut([memory, Slow(str(slow), delay=0.2)], log=tmp_path / "records.jsonl")
    fan_out.write(record(0))
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fan_out.close()
    assert memory.closed
    assert not (tmp_path / ".records.jsonl.lock").exists()
    del fan_out
    gc.collect()
    until(lambda: any("closed" in line for line in delivered(slow)))
    assert numbers(slow) == [0]


class Closing(MetricSink):
    """Knows whether it was closed."""

    closed = False

    def emit(self, metrics, epoch, hook_point) -> None:
        """Nothing."""

    def close(self) -> None:
        self.closed = True


def test_a_record_after_closing_reaches_a_slow_sink_without_a_log_too(tmp_path):
    """In another temporary log, which goes as well; the sink knows the run, and closing again does nothing."""
    out = tmp_path / "slow.txt"
    fan_out = FanOut([Slow(str(out))])
    fan_out.set_run_context(strategy="a")
    fan_out.write(record(0))
    fan_out.close()
    fan_out.close()
    fan_out.write(record(1))
    log = fan_out.log
    fan_out.close()
    assert numbers(out) == [0, 1]
    assert [line["context"] for line in delivered(out) if "context" in line] == [{"strategy": "a"}] * 2
    assert not log.parent.exists()
    assert fan_out.pending == []
