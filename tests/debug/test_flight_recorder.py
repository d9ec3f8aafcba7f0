"""The last steps are in the file when something happens, whatever ended the run, and recording changes nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_first_bad import Run, log_of_negative
from helpers_house import House, differences, fingerprint, house_batch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hookline as hl
from hookline.debug import FlightRecorder, read_flight
from hookline.observe.watch.monitor import StepRows


def test_the_steps_before_a_nan_are_written_with_batch_and_loss(tmp_path: Path) -> None:
    """Three steps of a loop of one's own."""
    run, path = Run(log_of_negative), tmp_path / "flight.json"
    recorder, loader = FlightRecorder(to=path, keep=3), DataLoader(run.data, batch_size=None)
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


def _train(hooks: list[Any]) -> dict[str, Tensor]:
    experiment = Steps()
    hl.step_loop(experiment, steps=20, manager=hl.HookManager(hooks=hooks), snapshot_every=0)
    return fingerprint(experiment.model, experiment.optimizer, experiment.losses)


class Drawing(FlightRecorder):
    """Draws a number where it should only look."""

    def around_step(self, step: Any, batch: Any) -> Any:
        torch.rand(1)
        return super().around_step(step, batch)


def test_a_recorded_run_is_the_run_without_to_the_last_bit(tmp_path: Path) -> None:
    """Twenty steps with dropout, BatchNorm and AdamW; negative control: a recorder that draws."""
    bare = _train([])
    assert differences(bare, _train([FlightRecorder(to=tmp_path / "a.json")])) == []
    assert differences(bare, _train([Drawing(to=tmp_path / "b.json")])) != []


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
    """With what to do next."""
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
