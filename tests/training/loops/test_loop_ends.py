"""Whatever ends a loop (an error, Ctrl-C, a hook), the run is left as it was and what hooks returned is written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from helpers_loops import linear_experiment, noting
from helpers_waiting import PATIENCE
from helpers_warm import run_warm

import hookline as hl


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_whatever_ends_the_run_everything_is_written(error):
    """The steps of the epoch that was cut short are in the sink, and it is flushed."""

    class Flushed(hl.sinks.MemorySink):
        flushes = 0

        def flush(self):
            self.flushes += 1

    sink, hook = Flushed(), noting("POST_STEP")
    experiment = linear_experiment(3)
    trained = []

    def train_step(batch):
        trained.append(batch)
        if len(trained) == 6:
            raise error
        return 1.0

    experiment.train_step = train_step
    with pytest.raises(error):
        hl.epoch_loop(experiment, epochs=9, manager=hl.HookManager(hooks=[hook], sinks=[sink]))
    assert sink.series("noting/seen") == [(0, [1, 2, 3]), (1, [4, 5])]
    assert sink.flushes == 1


def test_an_interrupted_intervention_leaves_the_run_where_it_was():
    """After four steps: the weights are those of four steps, and what hooks had returned is written."""

    class Interrupted(hl.InterventionHook):
        hook_points = {hl.HookPoint.POST_STEP}

        def intervene(self, run_ctx, model_ctx):
            model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
            if run_ctx.step == 3:
                raise KeyboardInterrupt
            return {"step": run_ctx.step}

    experiment, expected, sink = linear_experiment(3), linear_experiment(3), hl.sinks.MemorySink()
    with pytest.raises(KeyboardInterrupt):
        hl.epoch_loop(experiment, epochs=9, manager=hl.HookManager(hooks=[Interrupted()], sinks=[sink]))
    hl.step_loop(expected, steps=4)
    assert torch.equal(experiment.model.weight, expected.model.weight)
    assert torch.equal(experiment.model.weight.grad, expected.model.weight.grad)
    assert sink.series("Interrupted/step") == [(0, [0, 1, 2])]


_INTERRUPTED = """
import os, signal, sys, torch
import hookline as hl

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).zero_grad()  # loads the compiler, once for all
folder, *places = sys.argv[1:]
for where in places:
    child = os.fork()
    if not child:
        os.dup2(os.open(f"{folder}/{where}.out", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open(f"{folder}/{where}.err", os.O_WRONLY | os.O_CREAT), 2)
        break
    print(where, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

def here(name, *args):
    if name == where:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
        os.kill(os.getpid(), signal.SIGINT)

class Sink:
    def emit(self, metrics, epoch, point): print("emit", epoch, point.name, sorted(metrics))
    def flush(self): print("flush", model.weight.abs().max().item() < 2, model.training)

class Looks(hl.TrainingHook):
    hook_points = {hl.HookPoint.PRE_STEP}
    def compute(self, ctx): here("compute"); return {"step": ctx.step}

class Breaks(hl.InterventionHook):
    hook_points = {hl.HookPoint.POST_STEP}
    def intervene(self, run_ctx, model_ctx):
        model_ctx.model.weight.data.fill_(9)
        model_ctx.model.eval()
        here("intervene")

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
experiment = hl.Experiment(model, torch.optim.SGD(model.parameters(), lr=0.1), [(torch.ones(4, 2), torch.ones(4, 1))])
experiment.evaluate = lambda model: here("evaluate")
experiment.on_epoch_end = lambda epoch, metrics: here("on_epoch_end")
hl.epoch_loop(experiment, epochs=1, manager=hl.HookManager(hooks=[Looks(), Breaks()], sinks=[Sink()]))
print("done")
"""


_PLACES = ("compute", "intervene", "evaluate", "on_epoch_end", "nowhere")


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, tuple[int, str, str]]:
    """How a process for each place ended, and what it printed: forked from one, since loading torch takes seconds."""
    folder = tmp_path_factory.mktemp("interrupted")
    command = [sys.executable, "-W", "ignore", "-c", _INTERRUPTED, str(folder), *_PLACES]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_warm(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, env=environment, check=True)
    codes = dict(line.split() for line in done.stdout.splitlines())
    return {
        where: (int(codes[where]), (folder / f"{where}.out").read_text(), (folder / f"{where}.err").read_text())
        for where in _PLACES
    }


@pytest.mark.parametrize("where", _PLACES)
def test_ctrl_c_writes_everything_and_ends_the_program_as_python_does(where, ended):
    """A real signal, in a process of its own; the last is the negative control."""
    code, printed, complaint = ended[where]
    lines = printed.splitlines()
    if where == "nowhere":
        assert (code, lines[-2:]) == (0, ["flush True True", "done"])
        return
    assert code == -signal.SIGINT
    assert complaint.rstrip().endswith("KeyboardInterrupt")
    assert lines[-1] == "flush True True"
    assert ("emit 0 PRE_STEP ['Looks/step']" in lines) == (where != "compute")
