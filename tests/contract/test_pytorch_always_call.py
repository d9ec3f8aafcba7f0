"""PyTorch: forward hooks that run however the call ends."""

from __future__ import annotations

import warnings

import pytest
from helpers_models import Broken, Fn, Scale

import hookline as hl


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
