"""Hooks on optimizers: when they fire, in which order, what they may change, and that they come off without trace."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_sites import ignore
from helpers_waiting import PATIENCE
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

import hookline as hl
from hookline.sites.kinds import OPTIMIZER
from hookline.sites.optimizers import OptimizerSite, attach_optimizer, optimizer_entries

KINDS = [kind.value for kind in OPTIMIZER.args]
STEP_KINDS = ["step_pre", "step_post"]


def make(kind: type[Optimizer] = SGD, **options: Any) -> Optimizer:
    """An optimizer of one parameter with a gradient."""
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return kind([weight], **{"lr": 0.1, **options})


def weight_of(optimizer: Optimizer) -> Tensor:
    return optimizer.param_groups[0]["params"][0]


def dictionaries(optimizer: Optimizer) -> dict[str, list[Any]]:
    """What torch holds for the optimizer, kind by kind."""
    return {kind: list(getattr(optimizer, f"_optimizer_{kind}_hooks").values()) for kind in KINDS}


def assert_no_trace(optimizer: Optimizer) -> None:
    """Every dictionary of torch's is empty, the global ones too."""
    assert dictionaries(optimizer) == {kind: [] for kind in KINDS}
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks


def exercise(optimizer: Optimizer) -> None:
    """Do whatever fires a hook of any kind."""
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def everywhere(hook: Callable[..., Any], on: str, **options: Any) -> hl.HookHandle:
    """Put a hook on every optimizer."""
    return hl.attach_everywhere(hook, on=on, **options)


# -- what a hook is handed, and what it may hand back -----------------------------------------------------------


@pytest.mark.parametrize(
    "returned",
    [
        lambda opt, args, kwargs: 5,
        lambda opt, args, kwargs: [args, kwargs],
        lambda opt, args, kwargs: (args, kwargs, None),
        lambda opt, args, kwargs: (list(args), kwargs),
        lambda opt, args, kwargs: (args, None),
        lambda opt, args, kwargs: ((), kwargs),
        lambda opt, args, kwargs: ((lambda: 0.0,), kwargs),
    ],
)
def test_anything_else_from_a_step_pre_hook_is_an_error_that_names_it(returned: Callable[..., Any]) -> None:
    """Also arguments that lack the optimizer, which torch would take the first of for ``self``."""
    optimizer = make()
    attach_optimizer(optimizer, returned, on="step_pre", name="mine")
    with pytest.raises(
        hl.errors.HookReturnError, match=r"step_pre hook 'mine' on SGD must return None or \(new_args, new_kw"
    ):
        optimizer.step()
    assert torch.equal(weight_of(optimizer), torch.ones(3))


def test_state_hooks_may_put_another_dict_in_place() -> None:
    """Each sees what the one before returned, the caller gets the last, and loading uses it."""
    optimizer = make()
    attach_optimizer(optimizer, lambda opt, state: {**state, "mark": 1}, on="state_dict_post")
    attach_optimizer(optimizer, lambda opt, state: {**state, "mark": state["mark"] + 1}, on="state_dict_post")
    saved = optimizer.state_dict()
    assert saved["mark"] == 2

    def faster(opt: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "param_groups": [{**group, "lr": 9.0} for group in state["param_groups"]]}

    attach_optimizer(optimizer, faster, on="load_state_dict_pre")
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 9.0


@pytest.mark.parametrize("kind", ["state_dict_post", "load_state_dict_pre"])
def test_a_state_hook_that_returns_no_dict_is_an_error_that_names_it(kind: str) -> None:
    """torch would carry on with it."""
    optimizer = make()
    attach_optimizer(optimizer, lambda opt, state: "junk", on=kind, name="mine")
    with pytest.raises(
        hl.errors.HookReturnError, match=f"{kind} hook 'mine' on SGD must return None or a state dict, but"
    ):
        exercise(optimizer)


# -- the site ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["step_post", "state_dict_post"])
def test_steps_are_counted_whatever_the_kind_of_hook(kind: str) -> None:
    """Also those that raise, and again from 0 when the hooks were gone."""
    optimizer = make()
    steps: list[int] = []

    def hook(*args: object, site: OptimizerSite) -> None:
        steps.append(site.step)

    def fail() -> float:
        raise ValueError("mine")

    for _ in range(2):
        with attach_optimizer(optimizer, hook, on=kind):
            exercise(optimizer)
            with pytest.raises(ValueError, match="mine"):
                optimizer.step(fail)
            exercise(optimizer)
    assert steps == [0, 2, 0, 2]
    assert_no_trace(optimizer)


# -- one step, one firing ---------------------------------------------------------------------------------------


class Twice(SGD):
    """Calls its parent's step, which torch has wrapped as well."""

    log: list[str] = []
    fail = False

    def step(self, closure: Any = None) -> Any:
        self.log.append("begin")
        result = super().step(closure)
        if self.fail:
            raise ValueError("mine")
        self.log.append("end")
        return result


def twice() -> Twice:
    make(SGD)  # torch wraps a class's step when its first instance is made
    optimizer = make(Twice)
    assert isinstance(optimizer, Twice)
    optimizer.log = []
    return optimizer


def log_steps(optimizer: Twice) -> None:
    for kind in STEP_KINDS:
        attach_optimizer(optimizer, lambda *args, kind=kind: optimizer.log.append(kind), on=kind)


def test_a_hook_that_has_taken_itself_off_gives_its_place_up() -> None:
    """Torch walks over it meanwhile; the next hook comes behind those that others have registered since."""
    optimizer, log = make(), []
    handle = hl.attach_optimizer(optimizer, lambda *args: handle.remove(), on="step_post")
    optimizer.register_step_post_hook(lambda *args: log.append("theirs"))
    optimizer.step()
    with hl.attach_optimizer(optimizer, lambda *args: log.append("ours"), on="step_post"):
        optimizer.step()
    assert log == ["theirs", "theirs", "ours"]
    assert len(dictionaries(optimizer)["step_post"]) == 1


def test_a_step_that_calls_its_parents_step_is_one_step() -> None:
    """Before all of it and after all of it, where torch's own hooks run twice."""
    optimizer = twice()
    theirs: list[int] = []
    optimizer.register_step_post_hook(lambda *args: theirs.append(1))
    log_steps(optimizer)
    for _ in range(2):
        optimizer.step()
    assert optimizer.log == ["step_pre", "begin", "end", "step_post"] * 2
    assert len(theirs) == 4


def test_a_compiled_step_fires_once_also_for_hooks_that_came_later() -> None:
    """Whether they were there when it was compiled or not."""
    optimizer = make()
    log: list[str] = []
    attach_optimizer(optimizer, lambda *args: log.append("pre"), on="step_pre")
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    step()
    with attach_optimizer(optimizer, lambda *args: log.append("post")):
        step()
    step()
    torch._dynamo.reset()
    assert log == ["pre", "pre", "post", "pre"]


# -- loss scaling -----------------------------------------------------------------------------------------------


def scaled_steps(optimizer: Optimizer, gradients: list[float]) -> None:
    """One step of a real scaler per gradient."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for gradient in gradients:
        optimizer.zero_grad()
        scaler.scale((weight_of(optimizer) * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def test_a_step_that_a_fused_optimizer_skips_by_itself_fires() -> None:
    """It is called; what it will do is in the tensor that torch has given it, before and after."""
    optimizer = make(AdamW, fused=True)
    log: list[tuple[str, float]] = []
    weights: list[Tensor] = []

    def hook(opt: Any, args: object, kwargs: object, *, site: OptimizerSite) -> None:
        log.append((site.kind.value, opt.found_inf.item()))
        weights.append(weight_of(opt).detach().clone())

    for kind in STEP_KINDS:
        attach_optimizer(optimizer, hook, on=kind)
    scaled_steps(optimizer, [1.0, float("inf"), 1.0])
    assert log == [(kind, found) for found in (0.0, 1.0, 0.0) for kind in STEP_KINDS]
    moved = [not torch.equal(before, after) for before, after in zip(weights[::2], weights[1::2], strict=True)]
    assert moved == [True, False, True]


# -- every optimizer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STEP_KINDS)
def test_a_hook_on_every_optimizer_fires_for_all_there_are_and_will_be(kind: str) -> None:
    """Once per step, ``super().step()`` or not, with a site that tells them apart."""
    old, doubled = make(), twice()
    seen: list[tuple[str, int]] = []

    def hook(opt: Optimizer, args: object, kwargs: object, *, site: OptimizerSite) -> None:
        seen.append((site.name, site.step))

    with everywhere(hook, kind) as handle:
        new = make(AdamW)
        for optimizer in (old, doubled, new, old, doubled):
            optimizer.step()
        assert handle.report().fired == 5
        assert handle.report().attached == 1
    for optimizer in (old, doubled, new):
        optimizer.step()
        assert_no_trace(optimizer)
    assert seen == [("SGD", 0), ("Twice", 0), ("AdamW", 0), ("SGD", 1), ("Twice", 1)]


# -- lifetime and copies ----------------------------------------------------------------------------------------


class Keeps(SGD):
    """Copies with everything it has, hooks included."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


def pickled(optimizer: Optimizer) -> Optimizer:
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("kind", [SGD, Keeps])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_a_hooked_optimizer_works_and_carries_no_hooks(
    kind: type[Optimizer], copied: Callable[[Optimizer], Optimizer]
) -> None:
    """Also if its class copies hooks: then nothing that acts comes along, and new hooks work as ever."""
    optimizer = make(kind)
    handles = [attach_optimizer(optimizer, ignore, on=each) for each in KINDS]
    exercise(optimizer)
    twin = copied(optimizer)
    weight_of(twin).grad = torch.ones(3)
    exercise(twin)
    assert [handle.report().fired for handle in handles] == [1] * 6
    assert list(optimizer_entries(twin)) == []
    with attach_optimizer(twin, ignore) as handle:
        twin.step()
    assert handle.report().fired == 1
    exercise(optimizer)
    assert [handle.report().fired for handle in handles] == [2] * 6


# -- errors and reports -----------------------------------------------------------------------------------------


class Wrapper(Optimizer):
    """Like accelerate's: an optimizer by name, that holds the real one and never sets itself up."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Hidden(Wrapper):
    """A wrapper that keeps the real one where nobody looks for it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.the_real_one = optimizer


class Bare(Wrapper):
    """A wrapper that does not show what it holds."""

    def __init__(self) -> None:
        """Holds nothing."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: nn.Linear(1, 1), r"takes a torch.optim.Optimizer, got a Linear\..*Of a wrapper"),
        (lambda: None, r"takes a torch.optim.Optimizer, got a NoneType\."),
        (lambda: SGD, r"takes a torch.optim.Optimizer, got the class SGD\."),
        (lambda: torch.optim.lr_scheduler.StepLR(make(), 1), r"got a StepLR\..*pass the optimizer inside it"),
        (lambda: Hidden(make()), r"Hidden has no place for hooks.*Pass the optimizer inside it"),
        (lambda: Bare(), r"Bare has no place for hooks.*Pass the optimizer inside it\.\n"),
    ],
)
def test_what_is_no_optimizer_is_refused_with_the_way_out(given: Callable[[], Any], message: str) -> None:
    """It says what was given, and where the optimizer is."""
    with pytest.raises(hl.errors.UnhookableError, match=message):
        attach_optimizer(given(), ignore)


@pytest.mark.parametrize("kind", KINDS)
def test_somebody_elses_hook_may_take_ours_off(kind: str) -> None:
    """Ahead of it in torch's dictionary, and in the middle of torch's walk."""
    optimizer = make()
    getattr(optimizer, f"register_{kind}_hook")(lambda *args: ours.remove())
    fired: list[int] = []
    ours = attach_optimizer(optimizer, lambda *args: fired.append(1), on=kind)
    getattr(optimizer, f"register_{kind}_hook")(ignore)
    exercise(optimizer)
    assert fired == []
    again = attach_optimizer(optimizer, lambda *args: fired.append(2), on=kind)
    exercise(optimizer)
    again.remove()
    assert fired == [2]
    assert [len(hooks) for hooks in dictionaries(optimizer).values()] == [2 * (other == kind) for other in KINDS]


def test_another_thread_may_take_a_hook_off_in_the_middle_of_a_step() -> None:
    """While it runs, with somebody else's behind it."""
    optimizer = make()
    entered, removed = threading.Event(), threading.Event()
    theirs: list[int] = []

    def wait(*args: object) -> None:
        entered.set()
        assert removed.wait(PATIENCE)

    handle = attach_optimizer(optimizer, wait)
    optimizer.register_step_post_hook(lambda *args: theirs.append(1))

    def take_off() -> None:
        assert entered.wait(PATIENCE)
        handle.remove()
        removed.set()

    thread = threading.Thread(target=take_off)
    thread.start()
    optimizer.step()
    thread.join()
    optimizer.step()
    assert handle.report().fired == 1
    assert theirs == [1, 1]
