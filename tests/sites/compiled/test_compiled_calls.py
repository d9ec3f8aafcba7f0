"""Calls, structures, modes of torch and other tools around hooks in compiled code: as in eager code."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from helpers_compiled import (
    KINDS,
    Blocks,
    Seen,
    both_logs,
    breaks,
    compiled,
    graphs,
    observe_all,
    same_fires,
    same_values,
    step,
    tensors_in,
)
from helpers_threads import in_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

pytestmark = pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")


# -- calls -------------------------------------------------------------------------------------------------


class Reusing(nn.Module):
    """Calls one module three times, twice with the very same input, and knows it by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.alias = self.shared

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x) + self.alias(x) + self.shared(self.shared(x).relu())


def test_a_module_called_several_times_has_its_calls_numbered() -> None:
    """Also where two calls are the same to the compiler, which would run them once."""
    model, x = Reusing(), torch.randn(3, 4)
    eager, seen = both_logs(model, lambda run: (step(run, x), step(run, x)))
    for kind in KINDS:
        assert [s.where for s in seen if s.kind == kind] == [s.where for s in eager if s.kind == kind]
    assert [s.call for s in seen if s.kind == "forward" and s.name] == [0, 1, 2, 3] * 2
    assert same_values(sorted(seen, key=lambda s: s.where), sorted(eager, key=lambda s: s.where))
    assert (graphs(), breaks()) == (1, 0)


class Pair(NamedTuple):
    """What a module may take or give."""

    left: Tensor
    right: Tensor


@dataclass
class Parcel:
    """The same, as a dataclass."""

    value: Tensor
    label: str


class Giving(nn.Module):
    """Takes and gives structures of one make."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make = make

    def forward(self, given: Any) -> Any:
        x = next(value for value in flat_traced(given))
        return self.make(self.linear(x))


def flat_traced(value: Any) -> list[Tensor]:
    """The tensors in what `MAKES` make."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Parcel):
        return [value.value]
    if isinstance(value, transformers.modeling_outputs.BaseModelOutput):
        return [value.last_hidden_state]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in flat_traced(item)]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in flat_traced(item)]
    return []


class Chain(nn.Module):
    """Two of those in a row."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.one, self.two = Giving(make), Giving(make)

    def forward(self, x: Tensor) -> Tensor:
        return flat_traced(self.two(self.one(x)))[0]


MAKES: dict[str, Any] = {
    "tuple": lambda x: (x, None, 3),
    "list": lambda x: [x, x * 2],
    "dict": lambda x: {"x": x, "n": 1, "s": "text", "none": None},
    "namedtuple": lambda x: Pair(x, x * 2),
    "ModelOutput": lambda x: transformers.modeling_outputs.BaseModelOutput(last_hidden_state=x, hidden_states=(x,)),
    "dataclass": lambda x: Parcel(x, "label"),
    "nested": lambda x: {"a": [(x, {"b": x * 2})], "c": 0.5},
}


@pytest.mark.parametrize("make", MAKES)
def test_structures_come_as_they_do_in_eager_code(make: str) -> None:
    """The same classes around the same values, forward and gradient."""
    model, x = Chain(MAKES[make]), torch.randn(3, 4)
    kinds = ("forward_pre", "forward") if make == "dataclass" else KINDS
    logs = []
    for run in (model, compiled(model)):
        seen: list[Seen] = []
        classes: list[type] = []

        def note(module, args, output, classes=classes):
            classes.append(type(output))

        with observe_all(model, seen, kinds=kinds), hl.attach(model, "one", note, observe=True):
            step(run, x)
        logs.append((seen, classes))
    (eager, expected), (seen, classes) = logs
    assert same_fires(seen, eager)
    for ours, theirs in zip(seen, eager, strict=True):
        for a, b in zip(tensors_in(ours.values), tensors_in(theirs.values), strict=True):
            torch.testing.assert_close(a, b)
    assert classes == expected


def test_a_changing_batch_size_compiles_no_more_than_without_hooks() -> None:
    """torch makes the size dynamic at the second one; so it does with hooks."""
    counted = []
    for hooked in (False, True):
        torch._dynamo.reset()
        before = graphs()
        model, seen = Blocks(), []
        run = compiled(model)
        with observe_all(model, seen) if hooked else contextlib.nullcontext():
            for size in (2, 3, 5, 7, 11):
                step(run, torch.randn(size, 4))
        counted.append(graphs() - before)
        if hooked:
            for kind in KINDS:
                sizes = [s.values[0].shape[0] for s in seen if s.name == "layers.1" and s.kind == kind]
                assert sizes == [2, 3, 5, 7, 11]
    assert counted == [2, 2]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes_of_torch_are_the_same_for_hooks(mode: Any) -> None:
    """no_grad, inference_mode, autocast: the same firings and dtypes; gradient hooks where there are gradients."""
    model, x = Blocks(), torch.randn(3, 4)

    def act(run: Any) -> None:
        with mode():
            loss = run(x).float().sum()
        if loss.requires_grad:
            loss.backward()

    logs = both_logs(model, act)
    assert same_fires(*logs)
    for one, other in zip(*logs, strict=True):
        assert [getattr(v, "dtype", v) for v in one.values] == [getattr(v, "dtype", v) for v in other.values]


class Recomputing(Blocks):
    """Keeps no activations of its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_activation_checkpointing_counts_once() -> None:
    """The recomputation in the backward graph fires nothing; gradient hooks know their step and call."""
    model, x = Recomputing(), torch.randn(3, 4)
    eager, seen = both_logs(model, lambda run: (step(run, x), step(run, x)))
    first = [s for s in eager if s.kind.startswith("forward")]
    forwards = [s for s in seen if s.kind.startswith("forward")]
    assert len(forwards) == 2 * 2 * 9
    assert {s.where for s in forwards} == {s.where for s in first}
    ours, theirs = ([s for s in log if s.kind.startswith("backward")] for log in (seen, eager))
    assert collections.Counter(s.where for s in ours) == collections.Counter(s.where for s in theirs)
    assert breaks() == 0


# -- beside other tools ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_has_nothing_of_ours_in_it(strict: bool) -> None:
    """It runs where there is no hookline, and gives the same."""
    model, x, seen = Blocks(), torch.randn(3, 4), []
    expected = model(x)
    with observe_all(model, seen):
        program = torch.export.export(model, (x,), strict=strict)
    assert "hookline" not in str(program.graph)
    assert torch.allclose(program.module()(x), expected, atol=1e-6)


def test_two_threads_on_one_compiled_model_count_apart() -> None:
    """Each sees its own values, and its calls are numbered by its own forwards."""
    model, seen = Blocks(), []

    def note(module, args, output, *, site):
        seen.append((threading.get_ident(), site.call, float(args[0][0, 0])))

    run = compiled(model)
    with hl.attach(model, "", note, observe=True):
        run(torch.zeros(3, 4))
        seen.clear()
        in_threads(lambda number: [run(torch.full((3, 4), 1.0 + number)) for _ in range(20)])
    assert len(seen) == 40
    by_thread = {ident: {value for other, _, value in seen if other == ident} for ident, _, _ in seen}
    assert sorted(map(tuple, by_thread.values())) == [(1.0,), (2.0,)]
    assert {call for _, call, _ in seen} == {0}


def test_a_compiled_training_step_with_the_backward_in_it() -> None:
    """torch.compile of a whole step, where the compiler stops at backward()."""
    model, x = Blocks(), torch.randn(3, 4)

    def whole_step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    eager: list[Seen] = []
    with observe_all(model, eager):
        whole_step(x), whole_step(x)
    seen: list[Seen] = []
    run = torch.compile(whole_step, backend="aot_eager")
    with observe_all(model, seen):
        run(x), run(x)
    assert same_fires(seen, eager)
    assert same_values(seen, eager)


class _Watcher:
    """Hooks that are not plain functions."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def __call__(self, module, args, output):
        self.seen.append((float(args[0].detach().sum()), float(output.detach().sum())))

    def method(self, module, args, output=None, extra=3):
        self(module, args, output)

    def through_a_closure(self, module, args, output):
        (lambda: self(module, args, output))()

    def anything(self, *shown):
        self(*shown)


def test_hooks_of_every_make_are_shown_everything_they_look_at() -> None:
    """Instances, methods, partials, closures: what a hook does not read is not kept for it, what it reads is."""
    model, x, watcher = Blocks(1), torch.randn(3, 4), _Watcher()
    run = compiled(model)
    makes = [
        watcher,
        watcher.method,
        watcher.through_a_closure,
        watcher.anything,
        functools.partial(watcher.method, extra=4),
    ]
    for hook in makes:
        with hl.attach(model, "layers.0", hook, observe=True):
            run(x)
    expected = float(x.sum()), float(model(x).detach().sum())
    assert len(watcher.seen) == len(makes)
    for shown in watcher.seen:
        assert shown == pytest.approx(expected, abs=1e-4)
