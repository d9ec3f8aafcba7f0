"""Processes that end with hooks on, one per scenario: run by ``test_exit.py``, which reads what each wrote to stderr.

One process imports torch and forks a child for each scenario; the child runs it and then ends as any script ends.
What lives until the end is kept by modules that have no function of ours, and hooks are built in: in a ring with a
module's dictionary, models would go in silence, as garbage.
"""

from __future__ import annotations

import json.decoder
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

import hookline as hl

KEPT: Any = SimpleNamespace()
"""Where a scenario keeps what lives until the end."""


class Late(ModuleType):
    """A module that goes while hookline's own are whole."""


def keep_until(stage: str) -> None:
    """Have what is kept go ``early``, with a module of the user's, or ``late``, when hookline's modules are bare."""
    if stage == "late":
        json.decoder.kept = KEPT  # type: ignore[attr-defined]
    else:
        sys.modules["kept"] = Late("kept")
        sys.modules["kept"].kept = KEPT  # type: ignore[attr-defined]
    del globals()["KEPT"]


def train(made: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Take one step."""
    made(torch.ones(3, 2)).sum().backward()
    if optimizer is not None:
        optimizer.step()


def model() -> nn.Sequential:
    """Return a small model."""
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))


def attached(made: nn.Module) -> list[hl.HookHandle]:
    """Put a hook of every kind on every module."""
    kinds = ("forward_pre", "forward", "backward_pre", "backward", "param_grad")
    return [hl.attach(made, "*", print, on=kind) for kind in kinds]


def module_hooks() -> None:
    """Hooks of every kind are on, on a model that ran and one that did not."""
    KEPT.models = [model(), model()]
    KEPT.handles = list(map(attached, KEPT.models))
    train(KEPT.models[0])


def one_model_without_its_handle() -> None:
    """Nothing but the model is left."""
    KEPT.model = model()
    hl.attach(KEPT.model, "*", print)


def other_hooks() -> None:
    """Functions, operators, tensors, nodes and an optimizer are hooked, all modules of the process too."""
    KEPT.model = made = model()
    KEPT.everywhere = hl.attach_everywhere(print)
    targets = ("torch.nn.functional.relu", "torch.mm")
    KEPT.functions = [hl.attach_function(target, print) for target in (*targets, "aten.addmm")]
    KEPT.within = [hl.attach_function(target, print, within=made, on="backward") for target in targets]
    KEPT.optimizer = torch.optim.AdamW(made.parameters())
    KEPT.step = hl.attach_optimizer(KEPT.optimizer, print)
    KEPT.hidden = hidden = made[0](torch.ones(1, 2))
    KEPT.tensors = [hl.attach_tensor(hidden, print), hl.attach_tensor([hidden, made[2].weight], print)]
    KEPT.leaf = hl.attach_tensor(made[2].weight, print, on="param_grad")
    KEPT.node = hl.attach_node(hidden.grad_fn, print)
    KEPT.bounds = hl.freeze(made, "0"), hl.clip_gradients(made, "2", value=1.0)
    train(made, KEPT.optimizer)


def observers() -> None:
    """A watch, a capture, a patch and a profile are on, and a manager with a log and files was never closed."""
    KEPT.model = made = model()
    KEPT.optimizer = torch.optim.AdamW(made.parameters())
    KEPT.observers = (
        hl.watch(made, optimizer=KEPT.optimizer),
        hl.profile(made),
        hl.patch(made, {"0": hl.edits.scale(2.0)}),
    )
    KEPT.capture = hl.capture(made, "*")
    KEPT.capture.__enter__()
    folder = Path(tempfile.mkdtemp())
    sinks = [hl.sinks.CSVSink(folder / "a.csv"), hl.sinks.JSONLSink(folder / "b.jsonl")]
    KEPT.manager = hl.HookManager(hooks=[], sinks=sinks, log=folder / "records.jsonl")
    KEPT.manager.advance_step()
    hl.record("loss", 1.0)
    KEPT.manager.flush_step_metrics(0)
    train(made, KEPT.optimizer)


def exit_inside_hooks() -> None:
    """A hook ends the process: of a backward pass, inside of one of an operator, inside of ``with`` blocks."""
    KEPT.model = made = model()
    hl.attach(made, "0", print, on="backward")
    with hl.attach(made, "2", print), hl.capture(made, "*"), hl.attach_function("*.relu", print, within=made):
        train(made)
        hl.attach_function("aten.addmm", lambda *args: sys.exit(0))
        hl.attach(made, "0", lambda *args: made(torch.ones(1, 2)), on="backward_pre")
        train(made)


def an_error_inside_a_hook() -> None:
    """The error is all that is said."""
    KEPT.model = made = model()
    with hl.attach(made, "*", print), hl.watch(made), hl.attach(made, "2", lambda *args: 1 / 0, on="backward"):
        train(made)


def a_generator_left_in_its_with_blocks() -> None:
    """They are left when the interpreter throws the generator away."""

    def hooked(made: nn.Module) -> Iterator[None]:
        with hl.attach(made, "*", print), hl.capture(made, "*"), hl.watch(made), hl.profile(made):
            functions = hl.attach_function("*.relu", print), hl.attach_function("aten.mm*", print, within=made)
            with functions[0], functions[1]:
                train(made)
                yield

    KEPT.generator = hooked(model())
    next(KEPT.generator)


def compiled_models() -> None:
    """Hooks that came before and after a model was compiled."""
    torch._dynamo.reset()
    KEPT.models = [model(), model()]
    KEPT.first = attached(KEPT.models[0])
    KEPT.compiled = [torch.compile(made, backend="aot_eager") for made in KEPT.models]
    for run in KEPT.compiled:
        train(run)
    KEPT.later = attached(KEPT.models[1]), hl.watch(KEPT.models[1])
    train(KEPT.compiled[1])


RUNS: dict[str, tuple[str, list[Callable[[], None]]]] = {
    "hooks of every sort": ("late", [module_hooks, other_hooks, observers]),
    "a model alone": ("early", [one_model_without_its_handle]),
    "exit inside hooks": ("early", [exit_inside_hooks]),
    "an error inside a hook": ("early", [an_error_inside_a_hook]),
    "a generator": ("early", [a_generator_left_in_its_with_blocks]),
}
COMPILED: dict[str, tuple[str, list[Callable[[], None]]]] = {
    "compiled": ("early", [compiled_models]),
    "compiled, kept longer": ("late", [compiled_models]),
}


def main() -> None:
    """Run each in a child; print, as JSON, how each ended and what it wrote to stderr."""
    found = {}
    runs = RUNS
    if sys.argv[1:] == ["compiled"]:
        import torch._dynamo  # noqa: F401  # once for all children

        runs = COMPILED
    for name, (stage, scenarios) in runs.items():
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(writer, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.close(reader)
            os.close(writer)
            for run in scenarios:
                run()
            keep_until(stage)
            return
        os.close(writer)
        with os.fdopen(reader) as stream:
            said = stream.read()
        found[name] = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
