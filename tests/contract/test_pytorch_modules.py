"""PyTorch's semantics of module hooks: where torch is right, what it promises where it is not, copies and saving."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers_contract import EDITING, gradient_spy
from helpers_models import Args, Broken, Fn, Scale, leaf, logger, mlp
from helpers_modules import assert_untouched
from helpers_sites import COPIES
from torch import nn

import hookline as hl

FORWARD_KINDS = ["forward_pre", "forward"]
GRADIENT_KINDS = ["backward_pre", "backward"]
STATE_KINDS = ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]


def test_gradient_observers_see_edited_gradients_and_prepended_hooks_what_came():
    """The same for gradients: backward_pre edits reach the backward, backward edits reach upstream."""
    module, seen, x = Scale(5.0), {}, leaf(2)
    hl.attach(module, lambda m, go: seen.update(pre=go[0]), on="backward_pre", observe=True)
    hl.attach(module, lambda m, go: seen.update(raw_pre=go[0]), on="backward_pre", prepend=True)
    hl.attach(module, lambda m, gi, go: seen.update(post=(gi[0], go[0])), on="backward", observe=True)
    hl.attach(module, lambda m, gi, go: seen.update(raw=(gi[0], go[0])), on="backward", prepend=True)
    hl.attach(module, lambda m, go: (go[0] * 2,), on="backward_pre")
    hl.attach(module, lambda m, gi, go: (gi[0] * 100,), on="backward")
    module(x).sum().backward()
    one = torch.ones(2)
    assert torch.equal(seen["raw_pre"], one)
    assert torch.equal(seen["pre"], 2 * one)
    assert torch.equal(seen["raw"][0], 10 * one)
    assert torch.equal(seen["raw"][1], 2 * one)
    assert torch.equal(seen["post"][0], 1000 * one)
    assert torch.equal(seen["post"][1], 2 * one)
    assert torch.equal(x.grad, 1000 * one)


# -- beside other people's hooks ------------------------------------------------------------------------------


@pytest.mark.parametrize("foreign_first", [True, False], ids=["foreign_first", "foreign_last"])
@pytest.mark.parametrize("prepend", [False, True], ids=["appended", "prepended"])
@pytest.mark.parametrize("through", ["model", "child"])
def test_our_edits_run_before_foreign_hooks_and_our_observers_after(foreign_first, prepend, through):
    """Whoever came first, and wherever torch was asked to put theirs: ours edit first and observe last.

    Places among hooks that come later are looked after as the model begins; of a child called by itself, one call late.
    """
    model, events = nn.Sequential(Scale(), Scale()), []
    child = model[0]

    def foreign():
        child.register_forward_pre_hook(logger(events, "foreign pre"), prepend=prepend)
        child.register_forward_hook(logger(events, "foreign post"), prepend=prepend)

    if foreign_first:
        foreign()
    for short, kind in (("pre", "forward_pre"), ("post", "forward")):
        hl.attach(model, "0", logger(events, f"our {short} observer"), on=kind, observe=True)
        hl.attach(model, "0", logger(events, f"our {short} edit"), on=kind)
    if not foreign_first:
        foreign()
    if through == "child" and not foreign_first:
        child(torch.ones(2))
        events.clear()
    (model if through == "model" else child)(torch.ones(2))
    assert events == [
        "our pre edit",
        "foreign pre",
        "our pre observer",
        "our post edit",
        "foreign post",
        "our post observer",
    ]


@EDITING
def test_torchs_own_backward_hooks_on_the_same_module_keep_working(editing):
    """A native full backward hook and ours report the same gradients, and ours leave it where it was."""
    module, seen, native, x = nn.Linear(3, 2), [], [], leaf(4, 3)
    handle = hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    module.register_full_backward_hook(lambda m, gi, go: native.append((gi, go)))
    module(x).square().sum().backward()
    assert len(seen) == len(native) == 1
    for ours, theirs in zip(seen[0], native[0], strict=True):
        assert len(ours) == len(theirs) == 1
        assert torch.equal(ours[0], theirs[0])
    handle.remove()
    module(x).square().sum().backward()
    assert (len(seen), len(native)) == (1, 2)


# -- return values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "args"),
    [(7, (7,)), ([1, 2], ([1, 2],)), ((1, 2), (1, 2)), ((), ()), (None, ("x",)), (0, (0,))],
    ids=["value", "list", "tuple", "empty", "none", "falsy"],
)
def test_what_a_pre_hook_returns_becomes_the_arguments(returned, args):
    """A value is wrapped, a list is one argument, a tuple is the arguments, () is none, None leaves them."""
    module, native = Args(), Args()
    hl.attach(module, lambda m, args: returned, on="forward_pre")
    native.register_forward_pre_hook(lambda m, args: returned)
    assert module("x", key=1) == (args, {"key": 1}) == native("x", key=1)


@pytest.mark.parametrize("bad", [7, (1,), [(), {}], ((), {}, 3), ("args", {}), ((), ["kwargs"])], ids=repr)
def test_a_bad_return_of_a_pre_hook_with_kwargs_raises_and_names_the_hook(bad):
    """Anything but (tuple, dict) is a RuntimeError that names the hook and the module."""
    model = nn.Sequential(Args())
    hl.attach(model, "0", lambda m, args, kwargs: bad, on="forward_pre", with_kwargs=True, name="my_culprit")
    with pytest.raises(RuntimeError, match=r"my_culprit.*'0'") as caught:
        model("x")
    assert isinstance(caught.value, hl.errors.HookReturnError)


def test_hooks_without_kwargs_never_see_them():
    """A kwargs-only call gives a plain hook args == ()."""
    module, seen = Args(), []
    hl.attach(module, lambda m, args: seen.append(args), on="forward_pre")
    hl.attach(module, lambda m, args, output: seen.append(args))
    module(key=1)
    assert seen == [(), ()]


@pytest.mark.parametrize("kind", GRADIENT_KINDS)
@pytest.mark.parametrize(
    "bad",
    [
        lambda grads: (),
        lambda grads: (*grads, *grads),
        lambda grads: "junk",
        lambda grads: ("junk",),
        lambda grads: (grads[0][:1],),
        lambda grads: (grads[0].double(),),
    ],
    ids=["too_few", "too_many", "string", "not_a_tensor", "shape", "dtype"],
)
def test_gradients_that_do_not_fit_raise_and_name_the_hook(kind, bad):
    """Wrong count, type, shape or dtype of returned gradients is a RuntimeError that names the hook."""
    module = nn.Linear(3, 2)
    hl.attach(module, lambda m, *grads: bad(grads[0]), on=kind, name="my_culprit")
    with pytest.raises(RuntimeError, match="my_culprit") as caught:
        module(leaf(4, 3)).sum().backward()
    assert isinstance(caught.value, hl.errors.HookReturnError)


def test_gradient_edits_of_several_inputs_and_outputs_each_reach_their_own():
    """With two inputs and two outputs, each returned gradient goes to its own tensor."""
    module = Fn(lambda a, b: (a * 2, b * 3))
    a, b = leaf(2), leaf(2, seed=2)
    hl.attach(module, lambda m, go: (go[0] * 10, go[1] * 100), on="backward_pre")
    hl.attach(module, lambda m, gi, go: (gi[0] + 1, gi[1] + 2), on="backward")
    first, second = module(a, b)
    (first + second).sum().backward()
    assert torch.equal(a.grad, torch.full((2,), 21.0))
    assert torch.equal(b.grad, torch.full((2,), 302.0))


def test_none_in_place_of_a_gradient_cuts_it():
    """A backward hook that returns (None,) lets nothing through: an optimizer step moves nothing upstream."""
    model = mlp()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hl.attach(model, "2", lambda m, gi, go: (None,), on="backward")
    model(leaf(4, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False, True, True]


def test_full_backward_leaves_room_for_other_backward_hooks_after_removal():
    """torch keeps a flag for ever that forbids mixing; ours takes it back with the last hook."""
    module = nn.Linear(3, 2)
    hl.attach(module, lambda m, gi, go: None, on="full_backward").remove()
    assert_untouched(module)
    module.register_backward_hook(lambda m, gi, go: None)
    assert module._is_full_backward_hook is False


# -- coming and going, copies, saving and loading --------------------------------------------------------------


def test_attachment_is_all_or_nothing_when_a_module_refuses():
    """If torch refuses one of many modules, none keeps the hook, and the error comes through."""
    model = mlp()
    legacy = model[2].register_backward_hook(lambda m, gi, go: None)
    with pytest.raises(RuntimeError):
        hl.attach(model, "*", lambda m, gi, go: None, on="full_backward")
    legacy.remove()
    model[2]._is_full_backward_hook = None  # torch's own flag, which it never takes back
    assert_untouched(model)
    assert hl.attached(model) == []


@pytest.mark.parametrize("duplicate", COPIES)
def test_a_copy_keeps_the_hooks_of_others_and_saves_and_loads_beside_them(duplicate):
    """A foreign state hook next to ours comes along, as in torch, and state_dict() of the copy works."""
    model = mlp()
    for kind in STATE_KINDS:
        hl.attach(model, kind_hook, on=kind)
    model.register_state_dict_pre_hook(kind_hook)
    model.register_state_dict_post_hook(kind_hook)
    model.register_load_state_dict_pre_hook(kind_hook)
    model.register_load_state_dict_post_hook(kind_hook)
    copied = COPIES[duplicate](model)
    FOREIGN.clear()
    copied.load_state_dict(copied.state_dict())
    assert len(FOREIGN) == 4
    copied.load_state_dict(copied.state_dict())
    assert len(FOREIGN) == 8


FOREIGN = []


def kind_hook(*args):
    """A module-level hook, which a pickle can carry."""
    FOREIGN.append(args)


def test_state_dict_hooks_run_parents_first_before_and_children_first_after():
    """Pre hooks go down the tree, post hooks come up it, on saving and on loading."""
    model, events = nn.Sequential(nn.Sequential(nn.Linear(2, 2))), []
    for kind in STATE_KINDS:

        def hook(module, *args, site):
            events.append((site.kind.value, site.name))

        hl.attach(model, "*", hook, on=kind)
    model.load_state_dict(model.state_dict())
    down, up = ["", "0", "0.0"], ["0.0", "0", ""]
    assert events == [
        *[("state_dict_pre", name) for name in down],
        *[("state_dict_post", name) for name in up],
        *[("load_state_dict_pre", name) for name in down],
        *[("load_state_dict_post", name) for name in up],
    ]


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("observe", [False, True])
def test_always_call_hooks_run_when_the_forward_raises(error, observe):
    """Each runs once, with output None, whatever the exception, which then goes on as it was."""
    module, seen = Broken(error), []
    for label in "ab":
        hl.attach(
            module, lambda m, args, out, at=label: seen.append((at, args, out)), always_call=True, observe=observe
        )
    hl.attach(module, lambda m, args, out: seen.append("plain"))
    with pytest.raises(type(error)) as caught:
        module(1)
    assert caught.value is error
    assert seen == [("a", (1,), None), ("b", (1,), None)]


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("origin", ["our_pre", "our_post", "foreign_pre", "foreign_post"])
def test_always_call_hooks_run_when_another_hook_raises(error, origin):
    """Ours or foreign, before or after the forward: those that had no turn yet run, those that had do not again."""
    module, seen = Scale(5.0), []

    def raiser(*_):
        raise error

    hl.attach(module, lambda m, args, out: seen.append(("first", out)), always_call=True)
    if origin == "our_pre":
        hl.attach(module, raiser, on="forward_pre")
    elif origin == "our_post":
        hl.attach(module, raiser)
    elif origin == "foreign_pre":
        module.register_forward_pre_hook(raiser)
    else:
        module.register_forward_hook(raiser)
    hl.attach(module, lambda m, args, out: seen.append(("last", out)), always_call=True, observe=True)
    with pytest.raises(type(error)) as caught:
        module(2.0)
    assert caught.value is error
    output = 10.0 if origin.endswith("post") else None
    assert seen == [("first", output), ("last", output)]


def test_always_call_hooks_see_the_arguments_and_output_so_far():
    """As in torch: edited arguments when the forward raises, the edited output when a later hook does."""
    ours, native = [], []
    for seen, attach in (
        (ours, lambda module, hook, **options: hl.attach(module, hook, **options)),
        (native, lambda module, hook, **options: module.register_forward_hook(hook, **options)),
    ):
        broken, scale = Broken(ValueError("boom")), Scale(5.0)
        if seen is ours:
            hl.attach(broken, lambda m, args: (args[0] + 1,), on="forward_pre")
        else:
            broken.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        attach(broken, lambda m, args, out, seen=seen: seen.append((args, out)), always_call=True)
        with pytest.raises(ValueError, match="boom"):
            broken(1)
        attach(scale, lambda m, args, out: out + 1)
        attach(scale, lambda m, args, out: 1 / 0)
        attach(scale, lambda m, args, out, seen=seen: seen.append((args, out)), always_call=True)
        with pytest.raises(ZeroDivisionError):
            scale(2.0)
    assert native == [((2,), None), ((2.0,), 11.0)]
    assert ours == native


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=repr)
def test_an_error_inside_an_always_call_hook_is_a_warning_and_hides_nothing(error):
    """It is reported with the hook's name; the other cleanups still run and the original exception goes on."""
    module, seen = Broken(error), []
    hl.attach(module, lambda m, args, out: 1 / 0, always_call=True, name="bad_cleanup")
    hl.attach(module, lambda m, args, out: seen.append("ran"), always_call=True)
    with (
        pytest.warns(hl.HooklineWarning, match=r"bad_cleanup.*ZeroDivisionError"),
        pytest.raises(type(error)) as caught,
    ):
        module(1)
    assert caught.value is error
    assert seen == ["ran"]


def test_warnings_turned_into_errors_do_not_hide_the_original_exception():
    """Also under -W error: what the forward raised is what the caller gets."""
    module, error, seen = Broken(ValueError("boom")), None, []
    hl.attach(module, lambda m, args, out: 1 / 0, always_call=True)
    hl.attach(module, lambda m, args, out: seen.append("ran"), always_call=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            module(1)
        except Exception as caught:
            error = caught
    assert error is module.error
    assert seen == ["ran"]


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=repr)
def test_a_direct_forward_stays_silent_with_always_call_hooks_on(error):
    """module.forward(x) runs no cleanup, whether it raises or not, also while an outer call is under way."""
    broken, fine, seen = Broken(error), Scale(5.0), []
    for module in (broken, fine):
        hl.attach(module, lambda m, args, out: seen.append(out), always_call=True)
    assert fine.forward(2.0) == 10.0
    with pytest.raises(type(error)):
        broken.forward(1)
    outer = Fn(lambda x: broken.forward(x))
    with pytest.raises(type(error)):
        outer(1)
    assert seen == []
