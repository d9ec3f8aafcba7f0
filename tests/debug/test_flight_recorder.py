"""The last steps are in the file when something happens; all listeners on one model report what each does."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_first_bad import Run, log_of_negative, root_of_zero
from helpers_house import House, house_batch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hookline as hl
from hookline.debug import FlightRecorder, find_bad_operations, read_flight
from hookline.factories import nan_alarm
from hookline.observe.watch.monitor import StepRows
from hookline.phases import in_phase


def test_the_steps_before_a_nan_are_written_with_batch_and_loss(tmp_path: Path) -> None:
    """Three steps of a loop of one's own."""
    run, path = Run(log_of_negative), tmp_path / "flight.json"
    recorder, loader = FlightRecorder(to=path, keep=3), DataLoader(run.data, batch_size=None)
    means: list[float] = []
    layer = run.model.get_submodule("layers.3")
    handle = layer.register_forward_hook(lambda module, args, output: means.append(output.mean().item()))
    with hl.follow(run.model, run.optimizer, [recorder], loader=loader):
        for batch in loader:
            run.step(batch)
    flight = read_flight(path)
    assert recorder.written == ["NaN or infinity at layers.7/forward in step 2"] == [flight.reason]
    assert [step["step"] for step in flight.steps] == [0, 1, 2]
    assert flight.steps[2]["batch"] == "ids [2, 102]"
    assert flight.steps[2]["loss"] == "nan"
    assert flight.steps[2]["bad"].startswith("layers.7/forward")
    assert 0 < flight.steps[1]["statistics"]["layers.11/backward"]["norm"] < 10
    assert flight.steps[1]["statistics"]["layers.3/forward"]["mean"] == pytest.approx(means[1], rel=1e-3)
    handle.remove()
    assert "layers.7/forward" in str(flight)
    hl.assert_no_hooks(run.model)


class Steps(hl.Experiment):
    """House in one of our loops; a step raises, or the loss is large from a step on."""

    def __init__(self, *, raises: int = -1, spikes: int = -1) -> None:
        torch.manual_seed(0)
        model = House().train()
        super().__init__(model, torch.optim.AdamW(model.parameters(), lr=1e-2), list(range(20)))
        self.raises, self.spikes, self.losses = raises, spikes, []

    def loss_fn(self, model: nn.Module, batch: int) -> Tensor:
        loss = model(*house_batch(batch))["loss"]
        if batch == self.raises:
            raise RuntimeError("out of luck")
        self.losses.append(loss.detach())
        return loss * 100 if 0 <= self.spikes <= batch else loss


def test_an_exception_and_a_spike_are_written_and_shown_in_the_report(tmp_path: Path) -> None:
    """In a loop of ours: the file lies in the folder of the run, its page shows it. A loss that stays up rose once."""
    for raises, spikes, reason in ((13, -1, "RuntimeError: out of luck"), (-1, 12, "a loss spike")):
        folder = tmp_path / str(raises)
        hook = FlightRecorder(keep=8)
        manager = hl.HookManager(hooks=[hook], log=folder / "records.jsonl")
        context = {"run_dir": str(folder)}
        experiment = Steps(raises=raises, spikes=spikes)
        if raises >= 0:
            with pytest.raises(RuntimeError, match="out of luck"):
                hl.step_loop(experiment, steps=20, manager=manager, snapshot_every=0, run_context=context)
        else:
            hl.step_loop(experiment, steps=20, manager=manager, snapshot_every=0, run_context=context)
        flight = read_flight(folder / "flight_recorder.json")
        assert flight.reason.startswith(reason)
        assert len(hook.written) == 1
        assert [step["step"] for step in flight.steps] == list(range(max(raises, spikes) - 7, max(raises, spikes) + 1))
        page = hl.write_report(folder).read_text(encoding="utf-8")
        assert "The minutes before" in page
        assert f"written because of {reason}" in page
        manager.close()
    (tmp_path / "13" / "flight_recorder.json").write_text("{")
    assert "could not be read" in hl.write_report(tmp_path / "13").read_text(encoding="utf-8")


def test_a_signal_handler_may_write_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here while the recorder looks whether the numbers of a step have arrived: the step is written, and taken once."""
    path = tmp_path / "flight.json"
    recorder = FlightRecorder(to=path)
    before = signal.signal(signal.SIGUSR1, lambda *args: recorder.write("SIGUSR1"))
    is_there = StepRows.is_there

    def interrupted(rows: StepRows) -> bool:
        if rows.number == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        return is_there(rows)

    monkeypatch.setattr(StepRows, "is_there", interrupted)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with hl.follow(model, optimizer, [recorder]):
            for _ in range(6):
                model(torch.ones(3, 2)).sum().backward()
                optimizer.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert set(recorder.written) == {"SIGUSR1"}
    assert read_flight(path).steps[-1]["statistics"]


def test_a_file_that_cannot_be_written_is_said_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its folder becomes a file; a NaN and an exception want to write. Later the folder is back."""
    folder = tmp_path / "gone"
    folder.mkdir()
    model = nn.Sequential(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = FlightRecorder(to=folder / "flight.json")

    def run(steps: int) -> None:
        with hl.follow(model, optimizer, [recorder]):
            for number in range(steps):
                model(torch.full((2, 2), float("nan") if number == 2 else 1.0)).sum().backward()
                optimizer.step()
            raise KeyError("the end")

    folder.rmdir()
    folder.write_text("a file now")
    with pytest.raises(KeyError, match="the end"):
        run(5)
    (record,) = [each for each in caplog.records if each.name == "hookline.debug.flight_recorder"]
    assert "cannot be written" in record.getMessage()
    assert recorder.written == []
    folder.unlink()
    with pytest.raises(KeyError, match="the end"):
        run(1)
    assert "the end" in read_flight(folder / "flight.json").reason


def test_files_and_options_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("[]")
    with pytest.raises(hl.errors.OptionError, match="no file of a flight recorder"):
        read_flight(tmp_path / "no.json")
    (tmp_path / "new.json").write_text(json.dumps({"format": "hookline flight", "version": 9}))
    with pytest.raises(hl.errors.OptionError, match="version 9"):
        read_flight(tmp_path / "new.json")
    with pytest.raises(hl.errors.OptionError, match="keep="):
        FlightRecorder(keep=0)


def test_a_run_that_ends_by_sys_exit_writes_nothing(tmp_path: Path) -> None:
    run, recorder = Run(log_of_negative), FlightRecorder(to=tmp_path / "flight.json")
    with pytest.raises(SystemExit), hl.follow(run.model, run.optimizer, [recorder]):
        raise SystemExit(0)
    assert recorder.written == []


TOOLS = ("alarm", "finder", "recorder", "nan_alarm")
OTHERS = [(root_of_zero, True), (log_of_negative, False), (log_of_negative, True)]


def outcome(tools: Collection[str], planted: Callable[[Tensor], Tensor], folder: Path, *, whole: bool) -> Any:
    """Train four steps, the third of which has NaN; return the reports of each tool, the weights, the hooks in a block.

    With ``whole`` the finder makes whole steps again, the optimizer's with them; else the model's part of them.
    """
    run, path, found = Run(planted), folder / "flight.json", {}
    model, optimizer, loader, step = run.model, run.optimizer, DataLoader(run.data, batch_size=None), run.step
    with ExitStack() as on:
        hooks: list[Any] = []
        if "alarm" in tools:
            alarm = on.enter_context(hl.debug.alarm(model, optimizer=optimizer))
        if "finder" in tools:
            check = find_bad_operations(model, optimizer, step_fn=run.step if whole else None, every=2 if whole else 16)
            on.enter_context(check)
            step = check.step if whole else run.step
        if "recorder" in tools:
            hooks.append(FlightRecorder(to=path, target="layers.#"))
        if "nan_alarm" in tools:
            counts = nan_alarm()
            on.enter_context(hl.attach(model, "*", counts, observe=True))
        on.enter_context(hl.follow(model, optimizer, hooks, loader=loader, sinks=[]))
        model.eval()
        model(torch.zeros(2, 6, dtype=torch.long))  # no step, nor part of one
        model.train()
        for batch in loader:
            step(batch)
        of_block = [(handle.name, handle.report().kind) for handle in hl.attached(model.layers[3].up)]
    if "alarm" in tools:
        found["alarm"] = [str(each) for each in alarm.troubles]
    if "finder" in tools:
        found["finder"] = [str(each) for each in check.reports]
    if "recorder" in tools:
        flight = read_flight(path)
        found["recorder"] = [{**each, "time": 0} for each in flight.steps], flight.reason
    if "nan_alarm" in tools:
        found["nan_alarm"] = {key: value > 0 for key, value in counts.to_metrics().items()}
    hl.assert_no_hooks(model)
    return found, [parameter.detach().clone() for parameter in model.parameters()], of_block


@pytest.mark.parametrize(
    ("planted", "whole"), [(root_of_zero, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_all_on_one_model_report_what_each_does_alone(planted: Any, whole: bool, tmp_path: Path) -> None:
    """The weights are those of a run with none of them, bit for bit, and modules have one hook for each direction."""
    _, plain, none = outcome((), planted, tmp_path, whole=whole)
    together, weights, of_block = outcome(TOOLS, planted, tmp_path, whole=whole)
    assert none == []
    assert all(torch.equal(one.nan_to_num(7), other.nan_to_num(7)) for one, other in zip(plain, weights, strict=True))
    assert sorted(kind for name, kind in of_block if "NanAlarm" not in name) == ["backward_pre", "forward"]
    for tool in TOOLS:
        alone, _, _ = outcome([tool], planted, tmp_path, whole=whole)
        assert together[tool] == alone[tool], tool
        assert alone[tool], tool


def test_steps_of_an_intervention_are_no_steps_of_an_alarm() -> None:
    """The NaN is in the second step of the run, whatever was trained and put back before."""
    run = Run(log_of_negative, when=1)
    with hl.debug.alarm(run.model, optimizer=run.optimizer) as alarm:
        run.step(run.data[0])
        with hl.rollback(run.model, run.optimizer), in_phase("intervention"):
            run.step(run.data[2])
        run.step(run.data[1])
    assert {each.step for each in alarm.troubles} == {1}
