"""``scope="context"``: a hook fires for the calls of the thread, or asyncio task, that attached it, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers_threads import in_thread, in_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.sites import hook_at_site as context

STEPS = 50
CALLS = ["forward_pre", "forward", "backward_pre", "backward"]
"""The kinds that are about calls."""
STYLES = ["watches", "edits", "observes"]


pytestmark = pytest.mark.usefixtures("frequent_switches")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Whatever scopes a test opens, all are closed at its end."""
    before = set(context._LIVE)
    yield
    assert not context._LIVE - before


class Doubler(nn.Module):
    """Two modules, of which one hands its input on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Identity()
        self.twice = Twice()

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.same(x))


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Seen:
    """A hook, and the first number of each tensor it was shown."""

    def __init__(self, kind: str = "forward", style: str = "watches") -> None:
        self.kind = kind
        self.options: dict[str, Any] = {"on": kind, "observe": style == "observes"}
        self.values: list[float] = []
        self.hook: Callable[..., Any] = self.edit if style == "edits" else self.watch

    def watch(self, module: nn.Module, *args: Any) -> None:
        shown = args[0] if self.kind == "forward_pre" else args[-1]
        while isinstance(shown, tuple):
            shown = shown[0]
        self.values.append(shown.flatten()[0].item())

    def edit(self, module: nn.Module, *args: Any) -> Any:
        self.watch(module, *args)
        return args[-1] if self.kind == "forward" else args[0]

    def attach(self, model: nn.Module, target: Any = None, **options: Any) -> hl.HookHandle:
        return hl.attach(model, target, self.hook, **{"scope": "context", **self.options, **options})


def run(model: nn.Module, value: float = 1.0) -> Tensor:
    """Forward and backward; both the input and the gradient of the output are ``value``."""
    x = torch.full((2,), value, requires_grad=True)
    # The compiler asks every input for its gradient, and torch warns of that where it is no leaf.
    output: Tensor = model(x if isinstance(model, torch._dynamo.OptimizedModule) else x * 1)
    torch.autograd.grad((output * value).sum(), x)
    return output.detach()


def ones() -> Tensor:
    return torch.ones(2, requires_grad=True)


# -- threads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("style", STYLES)
def test_each_thread_sees_its_own_calls_alone(kind, style):
    """Hooks of two threads stay on, side by side: each sees the values of its own thread, every one of them once."""
    model, seen = Doubler(), [Seen(kind, style) for _ in range(2)]
    fired = [0, 0]

    def work(index: int) -> None:
        with seen[index].attach(model, "same") as handle:
            for step in range(STEPS):
                run(model, float(2 * step + index + 1))
            fired[index] = handle.report().fired

    in_threads(work)
    for index in range(2):
        factor = 2 if kind.startswith("backward") else 1  # the gradient comes through the doubling
        assert seen[index].values == [factor * float(2 * step + index + 1) for step in range(STEPS)]
    assert fired == [STEPS, STEPS]
    hl.assert_no_hooks(model, foreign=True)


# -- asyncio -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CALLS)
def test_each_task_sees_its_own_calls_alone(kind):
    """Two tasks take turns after every line."""
    model, wrong, before = Doubler(), [], context._OPEN.get()

    async def work(index: int) -> None:
        for step in range(10):
            seen, value = Seen(kind), float(2 * step + index + 1)
            handle = seen.attach(model, "same")
            await asyncio.sleep(0)
            x = torch.full((2,), value, requires_grad=True)
            output = model(x * 1)
            await asyncio.sleep(0)
            torch.autograd.grad((output * value).sum(), x)
            await asyncio.sleep(0)
            if (handle.report().fired, len(seen.values)) != (1, 1) or seen.values[0] not in (value, 2 * value):
                wrong.append((value, seen.values))
            handle.remove()
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(work(0), work(1))

    asyncio.run(both())
    assert wrong == []
    assert context._OPEN.get() == before
    hl.assert_no_hooks(model, foreign=True)


def test_what_a_task_starts_counts_as_its_own():
    """Tasks and ``asyncio.to_thread`` take a copy of the context, an executor does not."""
    model, seen = Doubler(), Seen()

    async def call(value: float) -> None:
        run(model, value)

    async def owner() -> None:
        loop = asyncio.get_running_loop()
        before = asyncio.create_task(call(1.0))  # its context is from before
        with seen.attach(model, "same"):
            await before
            await asyncio.create_task(call(2.0))
            await asyncio.to_thread(run, model, 3.0)
            await asyncio.gather(call(4.0), call(5.0))
            await loop.run_in_executor(None, run, model, 6.0)
            await call(7.0)
            late = asyncio.create_task(call(8.0))
        await late  # the hook is off

    asyncio.run(owner())
    assert sorted(seen.values) == [2.0, 3.0, 4.0, 5.0, 7.0]


# -- gradients: the owner is that of the forward -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["backward_pre", "backward"])
@pytest.mark.parametrize("style", STYLES)
def test_a_backward_in_another_thread_fires_for_the_owner_of_the_forward(kind, style):
    """Whoever calls ``backward``: it is the forward that counts."""
    model, mine, theirs = Doubler(), Seen(kind, style), Seen(kind, style)
    with mine.attach(model, "twice"):
        loss = (model(ones() * 1) * 3).sum()

        def elsewhere() -> None:
            with theirs.attach(model, "twice") as handle:
                loss.backward()
                assert handle.report().fired == 0
                handle.remove(quiet=True)

        in_thread(elsewhere)
    assert (mine.values, theirs.values) == ([3.0], [])


@pytest.mark.parametrize("kind", CALLS)
def test_the_first_run_of_a_checkpointed_call_is_its_callers(kind):
    """Checkpointing repeats the forward where the backward runs, on CUDA always in another thread: that is nobody's."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tanh = nn.Tanh()  # which keeps something for the backward, so that it has to run again

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.tanh, x, use_reentrant=False)

    model, seen = Checkpointed(), Seen(kind)
    with seen.attach(model, "tanh"):
        loss = model(ones() * 1).sum()
        in_thread(loss.backward)
    assert len(seen.values) == 1


# -- with other options --------------------------------------------------------------------------------------


def test_edits_are_made_in_the_owners_calls_alone():
    """Inputs, outputs and gradients of other threads stay as they are."""
    model = Doubler()
    with (
        hl.attach(model, "same", lambda module, args: (args[0] + 1,), on="forward_pre", scope="context"),
        hl.attach(model, "same", lambda module, args, output: output * 10, scope="context"),
    ):
        assert run(model, 1.0)[0].item() == 40.0
        assert in_thread(lambda: run(model, 1.0))[0].item() == 2.0
    with hl.attach(model, "twice", lambda module, grad_in, grad_out: (grad_in[0] * 0,), on="backward", scope="context"):
        for where, expected in ((lambda work: work(), 0.0), (in_thread, 2.0)):
            x = ones()
            where(lambda x=x: model(x * 1)).sum().backward()
            assert x.grad[0].item() == expected


@pytest.mark.parametrize("scope", ["thread", "task", "", None, True, 1])
def test_a_scope_that_there_is_not_is_an_error(scope):
    """Both that there are are named."""
    with pytest.raises(hl.errors.OptionError, match=r"scope= is 'process' or 'context', got"):
        hl.attach(Doubler(), "same", print, scope=scope)


@pytest.mark.parametrize(
    "kind",
    ["full_backward", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post", "param_grad",
     ],
)  # fmt: skip
def test_a_scope_goes_with_calls_alone(kind):
    """Saving and loading have no owner, and torch's own backward hook does not know it."""
    model = nn.Linear(2, 2)
    with pytest.raises(hl.errors.OptionError, match=f"scope='context' is about calls.*not with {kind}"):
        hl.attach(model, lambda *args: None, on=kind, scope="context")
    hl.assert_no_hooks(model, foreign=True)


def test_a_hook_whose_owner_never_ran_the_model_is_told_so():
    """The model ran, but for others: that is the reason to give."""
    model, seen = Doubler(), Seen()
    handle = seen.attach(model, "same")
    in_thread(lambda: run(model))
    with pytest.warns(hl.errors.HookNeverFired, match="context"):
        handle.remove()


# -- compiled ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("style", ["watches", "observes"])
def test_compiled_calls_have_their_owner_too(kind, style):
    """One graph for both threads; whose call it is, is asked when it runs."""
    torch._dynamo.reset()
    model, mine, theirs = Doubler(), Seen(kind, style), Seen(kind, style)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def other() -> int:
        with theirs.attach(model, "twice") as handle:
            run(compiled, 3.0)
            run(compiled, 5.0)
            return handle.report().fired

    with mine.attach(model, "twice") as handle:
        assert in_thread(other) == 2
        run(compiled, 1.0)
        assert in_thread(other) == 2
        run(compiled, 2.0)
        assert handle.report().fired == 2
    factor = 2 if kind == "forward" else 1
    assert mine.values == [factor * value for value in (1.0, 2.0)]
    assert theirs.values == [factor * value for value in (3.0, 5.0, 3.0, 5.0)]


@pytest.mark.parametrize(
    ("kind", "hook"),
    [("forward_pre", lambda module, args: (args[0] * 10,)), ("forward", lambda module, args, output: output * 10)],
)
def test_an_edit_that_would_become_part_of_the_graph_is_refused(kind, hook):
    """It would be made in everybody's calls: said while compiling, with what to do instead."""
    torch._dynamo.reset()
    model = Doubler()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.attach(model, "twice", hook, on=kind, scope="context") as handle:
        with pytest.raises(RuntimeError, match=r"edits, and has scope='context'.*observe=True"):
            compiled(ones())
        handle.remove(quiet=True)
    assert compiled(ones())[0].item() == 2.0


# -- nothing piles up ----------------------------------------------------------------------------------------


def test_scopes_are_forgotten_with_their_hooks():
    """A thousand hooks that came and went, and those of two hundred tasks, leave next to nothing."""
    model, live = Doubler(), set(context._LIVE)

    async def work() -> None:
        with Seen().attach(model, "same"):
            await asyncio.sleep(0)

    async def many() -> None:
        await asyncio.gather(*(work() for _ in range(200)))

    for _ in range(1000):
        Seen().attach(model, "same").remove()
    asyncio.run(many())
    assert live >= context._LIVE
    assert len(context._OPEN.get() - live) <= 1  # the last one goes when the next comes
