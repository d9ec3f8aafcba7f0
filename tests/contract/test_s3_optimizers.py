"""Source 002 around the model: optimizers, registration, and a run with hooks on everything at once.

Each test is one scenario of S3 in ACCEPTANCE.md, or one statement of SPEC.md 3.2, 3.3 and 3.6. Where torch has the same
hook and is right, the same scenario runs with torch's own. The last part trains with every observer of this library
on, and has to end with the bits of the plain run.
"""

from __future__ import annotations

import copy
import io
import random

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

import hookline as hl

STEP_KINDS = ["step_pre", "step_post"]
STATE_KINDS = ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]
KINDS = STEP_KINDS + STATE_KINDS
REGISTRATION = ["register_module", "register_parameter", "register_buffer"]
OPTIMIZERS = {
    cls.__name__: cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
}


class Outer(SGD):
    """Does something around the step of its base, as many libraries do."""

    def step(self, closure=None):
        return super().step(closure)


class Outermost(Outer):
    def step(self, closure=None):
        return super().step(closure)


class Raising(SGD):
    def step(self, closure=None):
        raise ZeroDivisionError("in the step")


def weights():
    return [nn.Parameter(torch.tensor([1.0, 2.0]))]


def with_gradients(optimizer, value=1.0):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, value)
    return optimizer


def sgd(lr=0.1, cls=SGD):
    return with_gradients(cls(weights(), lr=lr))


def weight_of(optimizer):
    return optimizer.param_groups[0]["params"][0]


def logger(events, label):
    """A hook for any kind that notes its label and returns nothing."""

    def hook(*_):
        events.append(label)

    return hook


def exercise(optimizer):
    """Everything that optimizer hooks are about, once."""
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def by_torch(optimizer, hook, kind):
    return getattr(optimizer, f"register_{kind}_hook")(hook)


def by_hookline(optimizer, hook, kind):
    return hl.attach_optimizer(optimizer, hook, on=kind)


BOTH = pytest.mark.parametrize("put", [by_torch, by_hookline], ids=["torch", "hookline"])


# -- order, arguments, edits --------------------------------------------------------------------------------


def test_hooks_on_every_optimizer_run_before_its_own_around_the_step():
    """DESIGN.md §5 for both sides of the step; torch turns the order round after it."""
    events = []

    class Noting(SGD):
        def step(self, closure=None):
            events.append("step")
            return super().step(closure)

    optimizer = sgd(cls=Noting)
    for kind in STEP_KINDS:
        hl.attach_optimizer(optimizer, logger(events, f"own {kind}"), on=kind)
        hl.attach_optimizer(optimizer, logger(events, f"own {kind} prepended"), on=kind, prepend=True)
    with (
        hl.attach_everywhere(logger(events, "every step_pre"), on="step_pre"),
        hl.attach_everywhere(logger(events, "every step_post"), on="step_post"),
    ):
        optimizer.step()
    assert events == [
        "every step_pre",
        "own step_pre prepended",
        "own step_pre",
        "step",
        "every step_post",
        "own step_post prepended",
        "own step_post",
    ]


@BOTH
def test_step_hooks_get_the_optimizer_and_the_arguments_of_the_step(put):
    """`(optimizer, args, kwargs)` where args[0] is the optimizer; the closure is where the caller put it."""
    optimizer, seen = sgd(), []

    def closure():
        return torch.tensor(3.0)

    for kind in STEP_KINDS:
        put(optimizer, lambda opt, args, kwargs, kind=kind: seen.append((kind, opt, args, kwargs)), kind)
    optimizer.step(closure)
    optimizer.step(closure=closure)
    assert [(kind, opt is optimizer) for kind, opt, _, _ in seen] == [(kind, True) for kind in STEP_KINDS * 2]
    assert [args for _, _, args, _ in seen] == [(optimizer, closure)] * 2 + [(optimizer,)] * 2
    assert [kwargs for *_, kwargs in seen] == [{}] * 2 + [{"closure": closure}] * 2


@BOTH
def test_a_step_pre_hook_may_change_the_arguments_and_the_gradients(put):
    """The returned (args, kwargs) is what the step is called with; gradients edited in place are stepped on."""
    optimizer, called = sgd(lr=1.0), []

    def edit(opt, args, kwargs):
        weight_of(opt).grad.mul_(0.5)
        return (opt, lambda: called.append("mine") or torch.tensor(7.0)), {}

    put(optimizer, edit, "step_pre")
    loss = optimizer.step(lambda: called.append("theirs"))
    assert called == ["mine"]
    assert loss == 7.0
    assert weight_of(optimizer).tolist() == [0.5, 1.5]


@BOTH
def test_step_pre_sees_the_old_weights_and_step_post_the_new(put):
    """SGD with lr 1 and gradient 1: [1, 2] before, [0, 1] after."""
    optimizer, seen = sgd(lr=1.0), {}
    for kind in STEP_KINDS:
        put(optimizer, lambda opt, *_, kind=kind: seen.update({kind: weight_of(opt).tolist()}), kind)
    optimizer.step()
    assert seen == {"step_pre": [1.0, 2.0], "step_post": [0.0, 1.0]}


@pytest.mark.parametrize("bad", [3, (1, 2, 3), ((), {}), [(), {}], ((None,), 1)], ids=str)
def test_a_bad_return_of_a_step_pre_hook_raises_and_names_the_hook(bad):
    """torch raises for most of these too; ours says whose return value it was, and nothing is stepped."""
    optimizer = sgd()

    def returns_nonsense(opt, args, kwargs):
        return bad

    hl.attach_optimizer(optimizer, returns_nonsense, on="step_pre")
    with pytest.raises(
        hl.errors.HookReturnError, match=r"returns_nonsense.*must return None or \(new_args, new_kwargs\)"
    ):
        optimizer.step()
    assert weight_of(optimizer).tolist() == [1.0, 2.0]


def test_what_a_step_post_hook_returns_is_ignored():
    """There is nothing to replace: the step returns its own result."""
    optimizer = sgd(lr=1.0)
    hl.attach_optimizer(optimizer, lambda opt, args, kwargs: ((), {}))
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0
    assert weight_of(optimizer).tolist() == [0.0, 1.0]


def test_an_observer_before_the_step_sees_the_edited_arguments_and_is_not_heard():
    """observe=True runs after the edits, whatever the order of attaching."""
    optimizer, seen, closure = sgd(), [], lambda: torch.tensor(1.0)
    hl.attach_optimizer(optimizer, lambda opt, args, kwargs: seen.append(args) or 5, on="step_pre", observe=True)
    hl.attach_optimizer(optimizer, lambda opt, args, kwargs: ((opt, closure), {}), on="step_pre")
    optimizer.step()
    assert seen == [(optimizer, closure)]


# -- once per step ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [SGD, Outer, Outermost])
def test_one_step_fires_once_also_where_step_calls_the_step_of_its_base(cls):
    """torch's own hooks fire once per class that has a step of its own."""
    torchs, ours, everywhere = [], [], []
    optimizer = sgd(cls=cls)
    for kind in STEP_KINDS:
        by_torch(optimizer, logger(torchs, kind), kind)
    for _ in range(2):
        optimizer.step()
    assert torchs.count("step_pre") == 2 * cls.__mro__.index(SGD) + 2
    optimizer = sgd(cls=cls)
    for kind in STEP_KINDS:
        by_hookline(optimizer, logger(ours, kind), kind)
    with (
        hl.attach_everywhere(logger(everywhere, "step_pre"), on="step_pre"),
        hl.attach_everywhere(logger(everywhere, "step_post"), on="step_post"),
    ):
        for _ in range(2):
            optimizer.step()
    assert ours == everywhere == STEP_KINDS * 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_fires_once_per_step_and_steps_as_without_hooks(name):
    """Pre and post once each, numbered, and the weights are those of the plain optimizer."""

    def run(hooked):
        torch.manual_seed(0)
        sparse = name == "SparseAdam"
        shape = (3, 2)  # Muon takes matrices alone
        parameter = nn.Parameter(torch.randn(*shape))
        optimizer, events = OPTIMIZERS[name]([parameter], lr=0.01), []
        if hooked:
            for kind in STEP_KINDS:

                def hook(opt, args, kwargs, *, site):
                    events.append((str(site.kind), site.step, site.name))

                hl.attach_optimizer(optimizer, hook, on=kind)

        def closure():
            optimizer.zero_grad()
            loss = (parameter**2).sum()
            loss.backward()
            if sparse:
                parameter.grad = parameter.grad.to_sparse()
            return loss

        for _ in range(3):
            closure()
            optimizer.step(closure)
        return parameter.detach(), events

    (hooked, events), (plain, _) = run(True), run(False)
    assert events == [(kind, step, name) for step in range(3) for kind in STEP_KINDS]
    assert torch.equal(hooked, plain)


def test_a_scheduler_on_the_same_optimizer_changes_nothing_about_the_firing():
    """torch's schedulers wrap step() on the instance, before or after our hooks came."""
    optimizer, events = sgd(), []
    hl.attach_optimizer(optimizer, logger(events, "before"))
    scheduler = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    hl.attach_optimizer(optimizer, logger(events, "after"))
    rates = []
    hl.attach_optimizer(optimizer, lambda opt, *_: rates.append(opt.param_groups[0]["lr"]), on="step_pre")
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    assert events == ["before", "after"] * 2
    assert rates == [0.1, 0.05]


@BOTH
def test_a_step_that_raises_has_no_post_hooks(put):
    """The pre hook fired, the error comes out as it is."""
    optimizer, events = sgd(cls=Raising), []
    for kind in STEP_KINDS:
        put(optimizer, logger(events, kind), kind)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="in the step"):
            optimizer.step()
    assert events == ["step_pre", "step_pre"]


@BOTH
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_that_a_scaler_skips_fires_nothing(put, bad):
    """An infinite gradient: the scaler does not call step(); the next, finite one fires once."""
    optimizer, events = sgd(lr=1.0), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    everywhere = logger(events, "everywhere")
    for kind in STEP_KINDS:
        put(optimizer, logger(events, kind), kind)
    with (
        hl.attach_everywhere(everywhere, on="step_post")
        if put is by_hookline
        else torch_optimizer.register_optimizer_step_post_hook(everywhere)
    ):
        for factor in (bad, 1.0):
            optimizer.zero_grad()
            scaler.scale((weight_of(optimizer) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            if factor is bad:
                assert events == []
                assert weight_of(optimizer).tolist() == [1.0, 2.0]
    assert sorted(events) == ["everywhere", "step_post", "step_pre"]
    assert weight_of(optimizer).tolist() == [0.0, 1.0]


def test_a_step_that_a_fused_optimizer_skips_by_itself_is_marked():
    """Its step is called either way, with found_inf on it: the site shows it, and the weights tell the same."""
    optimizer, seen = Adam(weights(), lr=1.0, fused=True), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def hook(opt, args, kwargs, *, site):
        seen.append((site.found_inf is not None and site.found_inf.item() > 0, weight_of(opt).tolist()))

    hl.attach_optimizer(optimizer, hook)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((weight_of(optimizer) * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [marked for marked, _ in seen] == [True, False]
    assert seen[0][1] == [1.0, 2.0]
    assert seen[1][1] != [1.0, 2.0]


def test_hooks_on_every_optimizer_reach_those_made_before_and_after():
    """As torch's global step hooks do, and none fires once they are off."""
    events, torchs = [], []
    earlier = sgd()
    with hl.HandleSet() as handles:
        for kind in STEP_KINDS:
            handles.add(hl.attach_everywhere(lambda opt, *_, kind=kind: events.append((kind, opt)), on=kind))
            register = getattr(torch_optimizer, f"register_optimizer_{kind}_hook")
            handles.add(register(lambda opt, *_, kind=kind: torchs.append((kind, opt))))
        later = sgd()
        for optimizer in (earlier, later, earlier):
            optimizer.step()
    later.step()
    expected = [(kind, optimizer) for optimizer in (earlier, later, earlier) for kind in STEP_KINDS]
    assert events == torchs == expected


# -- saving and loading -------------------------------------------------------------------------------------


@BOTH
def test_state_dict_hooks_of_optimizers_fire_with_torchs_arguments(put):
    """pre: (optimizer); post: (optimizer, state_dict); load pre: (optimizer, state_dict); load post: (optimizer)."""
    optimizer, seen = sgd(), []
    for kind in STATE_KINDS:
        put(optimizer, lambda *args, kind=kind: seen.append((kind, *map(type, args))), kind)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [
        ("state_dict_pre", SGD),
        ("state_dict_post", SGD, dict),
        ("load_state_dict_pre", SGD, dict),
        ("load_state_dict_post", SGD),
    ]


@BOTH
def test_a_state_dict_that_a_hook_returns_is_what_is_saved_and_loaded(put):
    """state_dict_post and load_state_dict_pre may return another dictionary; the given one stays as it is."""
    optimizer = sgd(lr=0.1)
    with put(optimizer, lambda opt, state: {**state, "extra": 1}, "state_dict_post"):
        state = optimizer.state_dict()
    assert state.pop("extra") == 1

    def slower(opt, state):
        state = copy.deepcopy(state)
        state["param_groups"][0]["lr"] = 0.025
        return state

    with put(optimizer, slower, "load_state_dict_pre"):
        optimizer.load_state_dict(state)
    assert state["param_groups"][0]["lr"] == 0.1
    assert optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_every_kind_run_in_registration_order_and_prepended_ones_first(kind):
    """As torch orders them with prepend=True, for the kinds that have it there."""
    labels, orders = [("a", False), ("b", True), ("c", True), ("d", False)], []
    for library in ("torch", "hookline"):
        optimizer, events = sgd(), []
        for label, prepend in labels:
            if library == "hookline":
                hl.attach_optimizer(optimizer, logger(events, label), on=kind, prepend=prepend)
            elif kind in STATE_KINDS:
                getattr(optimizer, f"register_{kind}_hook")(logger(events, label), prepend=prepend)
        exercise(optimizer)
        orders.append(events)
    assert orders[1] == ["c", "b", "a", "d"]
    assert kind in STEP_KINDS or orders[0] == orders[1]


# -- coming and going ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_may_remove_itself_and_add_another_while_firing(kind):
    """torch walks its dictionary live and raises; ours goes on, and the new one begins with the next step."""
    optimizer = sgd()
    handles = []
    handles.append(by_torch(optimizer, lambda *_: handles[0].remove(), kind))
    by_torch(optimizer, lambda *_: None, kind)
    with pytest.raises(RuntimeError, match="mutated during iteration"):
        exercise(optimizer)

    optimizer, events = sgd(), []

    def meddle(*_):
        events.append("meddle")
        handle.remove()
        hl.attach_optimizer(optimizer, logger(events, "added"), on=kind)

    handle = hl.attach_optimizer(optimizer, meddle, on=kind)
    hl.attach_optimizer(optimizer, logger(events, "later"), on=kind)
    exercise(optimizer)
    assert events == ["meddle", "later"]
    exercise(optimizer)
    assert events == ["meddle", "later", "later", "added"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_removes_a_later_one_does_not_affect_the_current_step(kind):
    """The snapshot rule, for optimizers too."""
    optimizer, events, handles = sgd(), [], {}
    hl.attach_optimizer(optimizer, lambda *_: handles["later"].remove(), on=kind)
    handles["later"] = hl.attach_optimizer(optimizer, logger(events, "later"), on=kind)
    exercise(optimizer)
    exercise(optimizer)
    assert events == ["later"]


@pytest.mark.parametrize("kind", KINDS)
def test_three_hooks_are_removed_one_by_one(kind):
    """Counts (1,1,1), (2,1,2), (2,1,3), as source 001's test has it; removing twice is harmless."""
    optimizer, counts = sgd(), [0, 0, 0]

    def counter(index):
        def hook(*_):
            counts[index] += 1

        return hook

    handles = [hl.attach_optimizer(optimizer, counter(index), on=kind) for index in range(3)]
    exercise(optimizer)
    assert counts == [1, 1, 1]
    handles[1].remove()
    exercise(optimizer)
    assert counts == [2, 1, 2]
    handles[0].remove()
    handles[0].remove()
    exercise(optimizer)
    assert counts == [2, 1, 3]


def test_nothing_is_left_when_every_hook_is_removed():
    """The optimizer's dictionaries and torch's global ones are empty, also when the body raises."""
    optimizer = sgd()

    def body():
        with hl.HandleSet([hl.attach_optimizer(optimizer, logger([], ""), on=kind) for kind in KINDS]) as handles:
            for kind in STEP_KINDS:
                handles.add(hl.attach_everywhere(logger([], ""), on=kind))
            exercise(optimizer)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    for name, value in vars(optimizer).items():
        assert "hooks" not in name or not value, name
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks


def test_a_copy_or_file_of_a_hooked_optimizer_carries_no_hook():
    """deepcopy and torch.save work with a lambda attached; the copy is silent and the original fires."""
    optimizer, events = sgd(), []
    for kind in KINDS:
        hl.attach_optimizer(optimizer, lambda *_: events.append("fired"), on=kind)
    stream = io.BytesIO()
    torch.save(optimizer, stream)
    stream.seek(0)
    for other in (copy.deepcopy(optimizer), torch.load(stream, weights_only=False)):
        exercise(with_gradients(other))
    assert events == []
    exercise(optimizer)
    assert len(events) == len(KINDS)


def test_foreign_hooks_on_the_optimizer_stay_where_they_are():
    """Only our own come off."""
    optimizer, events = sgd(), []
    optimizer.register_step_post_hook(logger(events, "foreign"))
    handle = hl.attach_optimizer(optimizer, logger(events, "ours"))
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert sorted(events) == ["foreign", "foreign", "ours"]
    assert len(optimizer._optimizer_step_post_hooks) == 1


@pytest.mark.parametrize(
    ("request_it", "error"),
    [
        (lambda: hl.attach_optimizer(nn.Linear(1, 1), lambda *_: None), hl.errors.UnhookableError),
        (lambda: hl.attach_optimizer(SGD, lambda *_: None), hl.errors.UnhookableError),
        (lambda: hl.attach_optimizer(sgd(), lambda *_: None, on="forward"), hl.errors.KindError),
        (lambda: hl.attach_optimizer(sgd(), lambda *_: None, on="step"), hl.errors.KindError),
        (lambda: hl.attach_optimizer(sgd(), lambda opt: None, on="step_pre"), hl.errors.HookSignatureError),
        (lambda: hl.attach_optimizer(sgd(), "hook"), hl.errors.HookSignatureError),
        (lambda: hl.attach_optimizer(sgd(), lambda *_: None, on="step_post", observe=True), hl.errors.OptionError),
        (lambda: hl.attach_everywhere(lambda *_: None, on="step_pre", within=nn.Linear(1, 1)), hl.errors.OptionError),
        (lambda: hl.attach(nn.Linear(1, 1), lambda *_: None, on="step_pre"), hl.errors.KindError),
    ],
    ids=["module", "class", "other kind", "no kind", "signature", "text", "option", "within", "wrong verb"],
)
def test_a_wrong_request_raises_before_anything_is_attached(request_it, error):
    """Each says what was asked; the last names the call that takes it."""
    with pytest.raises(error) as caught:
        request_it()
    assert isinstance(caught.value, hl.HooklineError)
    if error is hl.errors.KindError:
        assert "step_" in str(caught.value) or "attach" in str(caught.value)
    assert not torch_optimizer._global_optimizer_pre_hooks


# -- registration -------------------------------------------------------------------------------------------


GLOBAL_REGISTRATION = {
    "register_module": torch_module.register_module_module_registration_hook,
    "register_parameter": torch_module.register_module_parameter_registration_hook,
    "register_buffer": torch_module.register_module_buffer_registration_hook,
}


def things():
    return {
        "register_module": nn.ReLU(),
        "register_parameter": nn.Parameter(torch.ones(2)),
        "register_buffer": torch.ones(2),
    }


def store(module, kind, name, value, by):
    if by == "setattr":
        if kind == "register_buffer":
            value = nn.Buffer(value)
        setattr(module, name, value)
    else:
        getattr(module, kind)(name, value)


def registered_everywhere(kind, hook, library):
    return GLOBAL_REGISTRATION[kind](hook) if library == "torch" else hl.attach_everywhere(hook, on=kind)


@pytest.mark.parametrize("library", ["torch", "hookline"])
@pytest.mark.parametrize("by", ["method", "setattr"])
@pytest.mark.parametrize("kind", REGISTRATION)
def test_registration_hooks_fire_before_the_value_is_stored_by_method_and_by_assignment(kind, by, library):
    """`(module, name, value)`, while the module does not have it yet."""
    module, seen, value = nn.Module(), [], things()[kind]

    def hook(owner, name, given):
        seen.append((owner, name, given, hasattr(owner, name)))

    with registered_everywhere(kind, hook, library):
        store(module, kind, "thing", value, by)
    store(module, kind, "other", things()[kind], by)
    ((owner, name, given, there),) = seen
    assert owner is module
    assert name == "thing"
    assert given is module.thing
    assert not there


@pytest.mark.parametrize("library", ["torch", "hookline"])
@pytest.mark.parametrize("kind", REGISTRATION)
def test_what_a_registration_hook_returns_is_stored_instead(kind, library):
    """A replacement of the right type takes the place of the value."""
    module, other = nn.Module(), things()[kind]
    with registered_everywhere(kind, lambda owner, name, value: other, library):
        store(module, kind, "thing", things()[kind], "method")
    assert module.thing is other


@pytest.mark.parametrize("kind", REGISTRATION)
def test_junk_from_a_registration_hook_is_an_error_and_nothing_is_stored(kind):
    """torch stores whatever it is given."""
    module = nn.Module()
    with GLOBAL_REGISTRATION[kind](lambda owner, name, value: "junk"):
        store(module, kind, "thing", things()[kind], "method")
    assert module.thing == "junk"
    module = nn.Module()

    def returns_junk(owner, name, value):
        return "junk"

    with hl.attach(module, returns_junk, on=kind), pytest.raises(hl.errors.HookReturnError, match="returns_junk"):
        store(module, kind, "thing", things()[kind], "method")
    assert not hasattr(module, "thing")


@pytest.mark.parametrize("library", ["torch", "hookline"])
@pytest.mark.parametrize(("kind", "fires"), [("register_module", 1), ("register_parameter", 0), ("register_buffer", 1)])
def test_none_is_shown_to_module_and_buffer_hooks_alone(kind, fires, library):
    """A parameter hook is not called for None; the two others are."""
    module, seen = nn.Module(), []
    with registered_everywhere(kind, lambda owner, name, value: seen.append(value), library):
        getattr(module, kind)("nothing", None)
    assert seen == [None] * fires


@pytest.mark.parametrize("library", ["torch", "hookline"])
def test_registration_hooks_run_before_parameters_are_initialised(library):
    """A Linear registers its weight and then resets it: what the hook wrote is overwritten."""
    written = []

    def fill(owner, name, value):
        with torch.no_grad():
            value.fill_(123.0)
        written.append(name)

    with registered_everywhere("register_parameter", fill, library):
        module = nn.Linear(3, 2)
    assert written == ["weight", "bias"]
    assert not (module.weight == 123).any()


@pytest.mark.parametrize("kind", REGISTRATION)
def test_a_registration_hook_on_one_module_is_silent_for_others(kind):
    """torch has them for the whole process only; ours sits on the modules that match."""
    model, seen = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), []
    with hl.attach(model, "1", lambda owner, name, value: seen.append((owner, name)), on=kind):
        for module in (model, model[0], model[1]):
            store(module, kind, "thing", things()[kind], "method")
    assert seen == [(model[1], "thing")]


@pytest.mark.parametrize("kind", REGISTRATION)
def test_a_registration_hook_may_remove_itself_while_firing(kind):
    """torch raises for that: it walks its dictionary live."""
    handles = []
    handles.append(GLOBAL_REGISTRATION[kind](lambda *_: handles[0].remove()))
    handles.append(GLOBAL_REGISTRATION[kind](lambda *_: None))
    with pytest.raises(RuntimeError, match="mutated during iteration"):
        store(nn.Module(), kind, "thing", things()[kind], "method")
    handles[1].remove()

    module, events, ours = nn.Module(), [], {}

    def fire_once(label):
        def hook(*_):
            events.append(label)
            ours[label].remove()

        return hook

    ours["everywhere"] = hl.attach_everywhere(fire_once("everywhere"), on=kind)
    ours["here"] = hl.attach(module, fire_once("here"), on=kind)
    for name in ("one", "two"):
        store(module, kind, name, things()[kind], "method")
    assert events == ["everywhere", "here"]
    hl.assert_no_hooks(module)


def test_registration_hooks_leave_nothing_in_torchs_dictionaries():
    """After the last handle goes."""
    with hl.HandleSet([hl.attach_everywhere(lambda *_: None, on=kind) for kind in REGISTRATION]):
        nn.BatchNorm1d(2)
    assert not torch_module._global_parameter_registration_hooks
    assert not torch_module._global_buffer_registration_hooks
    assert not torch_module._global_module_registration_hooks


# -- everything at once -------------------------------------------------------------------------------------

STEPS = 20


class Swish(torch.autograd.Function):
    """A function of one's own."""

    @staticmethod
    def forward(ctx, x):
        gate = torch.sigmoid(x)
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        return grad * (gate + x * gate * (1 - gate))


class House(nn.Module):
    """What makes observation hard: dropout, BatchNorm, ReLU in place, residuals, a reused and an own function."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.stem = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.3)
        self.mix = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.act(self.norm(self.stem(x)))
        if self.use_reentrant is None:
            return self.rest(x)
        return checkpoint(self.rest, x, use_reentrant=self.use_reentrant)

    def rest(self, x):
        x = self.drop(x)
        x = x + torch.tanh(self.mix(x)) * torch.softmax(x @ self.mix.weight, dim=-1)
        return self.head(self.drop(Swish.apply(x)))


class Run:
    """Twenty steps of AdamW; a subclass may hook whatever it likes."""

    def __init__(self, *, use_reentrant=None):
        torch.manual_seed(0)
        random.seed(0)
        self.model = House(use_reentrant)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)

    def loss(self, batch, labels):
        return nn.functional.cross_entropy(self.model(batch), labels)

    def train(self):
        losses = []
        for _ in range(STEPS):
            batch, labels = torch.randn(12, 6), torch.randint(3, (12,))
            self.optimizer.zero_grad()
            loss = self.loss(batch, labels)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return {
            "losses": losses,
            "model": self.model.state_dict(),
            "grads": {name: parameter.grad for name, parameter in self.model.named_parameters()},
            "optimizer": self.optimizer.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
        }


class ObservedRun(Run):
    """The same with observers on modules, functions, tensors, leaves, nodes, saved tensors, the optimizer and more."""

    def __init__(self, *, observe=True, use_reentrant=None):
        super().__init__(use_reentrant=use_reentrant)
        self.fired = {}
        self.observe = observe
        self.profiled = 0

    def observer(self, label, *, returns=True):
        """Reads whatever tensors it is shown; with observe=True, what it returns must not matter."""

        def read(*values):
            self.fired[label] = self.fired.get(label, 0) + 1
            total = 0.0
            for value in values:
                for item in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(item, torch.Tensor) and item.is_floating_point():
                        total += item.detach().double().abs().sum().item()
            return total

        def read_quietly(*values):
            read(*values)

        return read if returns and self.observe else read_quietly

    def hooks(self):
        model, optimizer = self.model, self.optimizer
        kinds = ("forward_pre", "forward", "backward_pre", "backward")
        for kind in kinds:
            yield hl.attach(model, "*", self.observer(f"module {kind}"), on=kind, observe=self.observe)
            for name, target, within in (
                ("functions", "*", model),
                ("aten.mm", "aten.mm", None),
                ("aten.mm in the model", "aten.mm", model),
                ("Swish", Swish, None),
            ):
                hook = self.observer(f"{name} {kind}")
                yield hl.attach_function(target, hook, on=kind, within=within, observe=self.observe)
        yield hl.attach(model, "*", self.observer("param_grad"), on="param_grad")
        for parameter in model.parameters():
            yield hl.attach_tensor(parameter, self.observer("leaf grad"), observe=self.observe)
            yield hl.attach_node(parameter, self.observer("leaf node"), on="pre", observe=self.observe)
        yield hl.attach_tensor(list(model.parameters()), self.observer("all grads"))
        for kind in STEP_KINDS:
            yield hl.attach_optimizer(optimizer, self.observer(f"own {kind}", returns=False), on=kind)
            yield hl.attach_everywhere(self.observer(f"every {kind}", returns=False), on=kind)
        for kind in REGISTRATION:
            yield hl.attach(model, "*", self.observer(f"{kind} here"), on=kind, observe=self.observe)
            yield hl.attach_everywhere(self.observer(f"{kind} anywhere"), on=kind, observe=self.observe)
        yield hl.profile(model, functions="torch.nn.functional.*")

    def loss(self, batch, labels):
        hidden = []

        def keep(module, args, output):
            hidden.append(output)

        def pack(tensor):
            self.fired["pack"] = self.fired.get("pack", 0) + 1
            return tensor

        with (
            hl.saved_tensors(pack, lambda packed: packed) as scope,
            hl.attach(self.model, "stem", keep, observe=True),
        ):
            loss = super().loss(batch, labels)
        self.model.register_buffer("scratch", torch.zeros(1), persistent=False)
        hl.attach_tensor(hidden[0], self.observer("activation grad"), observe=self.observe)
        hl.attach_tensor([*hidden, loss], self.observer("activation and loss"))
        hl.attach_node(loss.grad_fn, self.observer("loss node pre"), on="pre", observe=self.observe)
        hl.attach_node(hidden[0].grad_fn, self.observer("activation node post"), on="post", observe=self.observe)
        assert scope.packed
        return loss

    def train(self):
        handles = list(self.hooks())
        try:
            return super().train()
        finally:
            for handle in reversed(handles):
                handle.remove()
            self.profiled = handles[-1].total.calls


def differences(one, other, path=""):
    """Where two nested states are not the same bit for bit."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [path]
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return [found for key in one for found in differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        pairs = enumerate(zip(one, other, strict=True))
        return [found for index, pair in pairs for found in differences(*pair, f"{path}/{index}")]
    return [] if one == other else [path]


@pytest.mark.parametrize("observe", [True, False], ids=["observe", "returns_nothing"])
def test_twenty_steps_with_every_observer_on_end_with_the_bits_of_the_plain_run(observe):
    """Losses, weights, buffers, gradients, AdamW's state and the random streams are identical; every observer fired."""
    observed = ObservedRun(observe=observe)
    found = differences(observed.train(), Run().train())
    assert found == []
    once = ["activation grad", "activation and loss", "loss node pre", "activation node post", "all grads"]
    once += [f"{who} {kind}" for who in ("own", "every") for kind in STEP_KINDS]
    once += [f"Swish {kind}" for kind in ("forward_pre", "forward", "backward_pre", "backward")]
    once += ["register_buffer here", "register_buffer anywhere"]
    assert {label: observed.fired.get(label) for label in once} == dict.fromkeys(once, STEPS)
    parameters = len(list(observed.model.parameters()))
    modules = len(list(observed.model.modules())) + 1  # drop is called twice
    for label in ("param_grad", "leaf grad", "leaf node"):
        assert observed.fired[label] == STEPS * parameters, label
    for kind in ("forward_pre", "forward", "backward_pre", "backward"):
        assert observed.fired[f"module {kind}"] == STEPS * modules, kind
        assert observed.fired[f"functions {kind}"] > STEPS * 8, kind
        assert observed.fired[f"aten.mm in the model {kind}"] == STEPS * 2, kind
        assert observed.fired[f"aten.mm {kind}"] >= STEPS * 2, kind
    assert observed.fired["pack"] > STEPS * 10
    assert observed.profiled == STEPS


@pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_a_checkpointed_run_with_every_observer_on_ends_with_the_bits_of_the_plain_run(use_reentrant):
    """The same with most of the forward repeated in the backward, dropout and all."""
    observed = ObservedRun(use_reentrant=use_reentrant)
    found = differences(observed.train(), Run(use_reentrant=use_reentrant).train())
    assert found == []
    for label in ("param_grad", "leaf node", "Swish backward", "module backward", "functions backward", "pack"):
        assert observed.fired[label] >= STEPS, label


def test_after_a_run_with_every_observer_the_model_and_the_process_are_as_before():
    """No hook of anybody is left on model, optimizer, function class or in torch's global dictionaries."""
    observed, apply = ObservedRun(), Swish.apply
    observed.train()
    hl.assert_no_hooks(observed.model, foreign=True)
    assert "apply" not in vars(Swish)
    assert Swish.apply == apply
    for name, value in vars(observed.optimizer).items():
        assert "hooks" not in name or not value, name
    for parameter in observed.model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
    for name, value in [*vars(torch_module).items(), *vars(torch_optimizer).items()]:
        assert not (name.startswith("_global") and name.endswith("hooks")) or not value, name
    fired = dict(observed.fired)
    observed.model(torch.randn(12, 6)).sum().backward()
    observed.optimizer.step()
    assert observed.fired == fired


DRAWING = {
    "module": lambda run, draw: hl.attach(run.model, "stem", draw),
    "function": lambda run, draw: hl.attach_function(torch.tanh, draw, within=run.model),
    "aten.mm": lambda run, draw: hl.attach_function("aten.mm", draw, within=run.model),
    "own function": lambda run, draw: hl.attach_function(Swish, draw, on="backward"),
    "param_grad": lambda run, draw: hl.attach(run.model, "head.bias", draw, on="param_grad"),
    "tensor": lambda run, draw: hl.attach_tensor(run.model.head.weight, draw),
    "node": lambda run, draw: hl.attach_node(run.model.head.weight, draw),
    "optimizer": lambda run, draw: hl.attach_optimizer(run.optimizer, draw),
}


@pytest.mark.parametrize("put", DRAWING.values(), ids=DRAWING.keys())
def test_one_hook_that_draws_a_random_number_is_found_out(put):
    """The negative control: the comparison sees it in the random stream and in the weights, whatever drew."""

    def draw(*_):
        torch.rand(1)

    run = Run()
    with put(run, draw):
        drawn = run.train()
    found = differences(drawn, Run().train())
    assert "/torch" in found
    assert "/model/stem.weight" in found


def test_one_pack_function_that_draws_a_random_number_is_found_out():
    """The same for saved tensors."""

    class Drawing(Run):
        def loss(self, batch, labels):
            with hl.saved_tensors(lambda tensor: torch.rand(1) is None or tensor, lambda packed: packed):
                return super().loss(batch, labels)

    found = differences(Drawing().train(), Run().train())
    assert "/torch" in found
    assert "/model/stem.weight" in found
