"""The errors: each is ours and the built-in one would guess, and each message says asked, found, next."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest
import torch
from torch import nn

import hookline as hl
from hookline import errors
from hookline.cli.screen import shell_text
from hookline.errors import Hint
from hookline.serve.http.error_answers import refusal_from_error

BUILTINS = {
    "NoMatchError": (KeyError, LookupError),
    "TargetError": (ValueError,),
    "KindError": (ValueError,),
    "OptionError": (ValueError, TypeError),
    "MissingPackageError": (ValueError, TypeError, ImportError),
    "HookSignatureError": (TypeError,),
    "UnhookableError": (TypeError, RuntimeError),
    "HookReturnError": (RuntimeError,),
    "HookCheckError": (AssertionError,),
    "HooksLeftError": (AssertionError,),
    "ScopeError": (RuntimeError,),
    "CaptureError": (RuntimeError,),
    "CompareError": (ValueError,),
    "TraceError": (RuntimeError,),
    "GuardError": (RuntimeError,),
    "HookNameError": (ValueError,),
    "MetricError": (TypeError,),
    "LifecycleError": (RuntimeError,),
    "NotAllowedError": (PermissionError,),
    "ConfigError": (ValueError,),
    "CheckpointError": (RuntimeError,),
    "RankError": (RuntimeError,),
    "ResumeError": (RuntimeError,),
    "NonFiniteError": (FloatingPointError, ArithmeticError),
    "EngineBusy": (RuntimeError,),
    "EngineClosed": (RuntimeError,),
}


def make_model() -> nn.Module:
    model = nn.Sequential()
    model.add_module("inner", nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    model.add_module("outer", nn.Linear(2, 2))
    return model


def hook(module, args, output):
    """A forward hook that does nothing."""


def assert_untouched(model: nn.Module) -> None:
    hl.assert_no_hooks(model, foreign=True)
    assert hl.attached(model) == []
    for module in model.modules():
        assert "_call_impl" not in vars(module)
        assert "forward" not in vars(module)


@pytest.mark.parametrize(("name", "builtins"), sorted(BUILTINS.items()))
def test_each_error_is_also_the_builtin_one_would_guess(name, builtins):
    """``except KeyError`` around a mistyped name does what it looks like."""
    error = getattr(errors, name)
    assert issubclass(error, hl.HooklineError)
    for builtin in builtins:
        assert issubclass(error, builtin)


def test_every_error_of_the_module_is_public_and_has_a_builtin():
    """No error class is missing from the table above or from ``__all__``."""
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, hl.HooklineError) and value is not hl.HooklineError
    }
    assert classes == set(BUILTINS)
    assert classes < set(errors.__all__)
    assert set(errors.__all__) == classes | {"HookNeverFired", "HooklineError", "HooklineWarning"}


@pytest.mark.parametrize("name", sorted(BUILTINS))
def test_each_error_prints_its_sentence_unquoted_and_survives_pickling(name):
    """``str`` is the sentence, not its repr, also after a trip through another process."""
    error = getattr(errors, name)("No module matches 'a'.")
    assert str(error) == "No module matches 'a'."
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


# -- bad input: what is refused, as what, with which words, and that nothing stays attached -------------------


def one_arg(module):
    """A hook that takes too little."""


def needs_more(module, args, output, extra):
    """A hook that needs too much."""


def keyword_needed(module, args, output, *, tag):
    """A hook with a keyword that nobody gives."""


BAD = {
    "unknown kind": (
        ("*", hook),
        {"on": "foward"},
        hl.errors.KindError,
        ValueError,
        r"'foward'.*[Nn]earest: 'forward'.*Kinds: ",
    ),
    "a kind that is no string": (("*", hook), {"on": 3}, hl.errors.KindError, ValueError, r"3.*Kinds: "),
    "no kind at all": (("*", hook), {"on": None}, hl.errors.KindError, ValueError, r"None.*Kinds: "),
    "the legacy backward hook": (
        ("*", hook),
        {"on": "register_backward_hook"},
        hl.errors.KindError,
        ValueError,
        r"deprecated.*use on='backward'",
    ),
    "with_kwargs on a backward hook": (
        ("*", hook),
        {"on": "backward", "with_kwargs": True},
        hl.errors.OptionError,
        ValueError,
        r"with_kwargs.*'backward'.*goes with forward, forward_pre",
    ),
    "always_call on a pre-hook": (
        ("*", lambda module, args: None),
        {"on": "forward_pre", "always_call": True},
        hl.errors.OptionError,
        TypeError,
        r"always_call.*'forward_pre'.*goes with forward",
    ),
    "observe on a state hook": (
        ("*", lambda *args: None),
        {"on": "state_dict_pre", "observe": True},
        hl.errors.OptionError,
        ValueError,
        r"observe.*'state_dict_pre'.*goes with",
    ),
    "a hook that is not callable": (("*", "print"), {}, hl.errors.HookSignatureError, TypeError, r"callable.*'print'"),
    "a hook that is None": (("*", None), {}, hl.errors.HookSignatureError, TypeError, r"callable.*None"),
    "a hook that takes too little": (
        ("*", one_arg),
        {},
        hl.errors.HookSignatureError,
        TypeError,
        r"one_arg\(module\).*forward.*hook\(module, args, output\)",
    ),
    "a hook that needs too much": (
        ("*", needs_more),
        {},
        hl.errors.HookSignatureError,
        TypeError,
        r"needs_more\(module, args, output, extra\).*extra",
    ),
    "a hook with a keyword nobody gives": (
        ("*", keyword_needed),
        {},
        hl.errors.HookSignatureError,
        TypeError,
        r"keyword_needed\(module, args, output, \*, tag\).*tag",
    ),
    "a hook without room for the keyword arguments": (
        ("*", lambda module, args, output: None),
        {"with_kwargs": True},
        hl.errors.HookSignatureError,
        TypeError,
        r"hook\(module, args, kwargs, output\)",
    ),
    "an empty list of targets": (([], hook), {}, hl.errors.TargetError, ValueError, r"empty.*give a name"),
    "an empty tuple of targets": (((), hook), {}, hl.errors.TargetError, ValueError, r"empty.*give a name"),
    "a target that is a number": ((7, hook), {}, hl.errors.TargetError, ValueError, r"7 is no target; give a name"),
    "a module of another model": (
        (nn.Linear(2, 2), hook),
        {},
        hl.errors.TargetError,
        ValueError,
        r"given Linear.*Sequential.*another model",
    ),
    "a mistyped name": (
        ("outr.*", hook),
        {},
        hl.errors.NoMatchError,
        KeyError,
        r"No module matches 'outr\.\*'.*nearest: .*'outer'.*hookline\.find",
    ),
    "a list with one mistyped name": (
        (["inner", "otuer"], hook),
        {},
        hl.errors.NoMatchError,
        KeyError,
        r"No module matches 'otuer'.*nearest: 'outer'",
    ),
    "a type the model does not have": (
        (nn.Conv2d, hook),
        {},
        hl.errors.NoMatchError,
        KeyError,
        r"is a Conv2d; it has Sequential ×2, Linear ×2, ReLU ×1",
    ),
    "an exclude that leaves nothing": (
        ("inner.*", hook),
        {"exclude": "inner.*"},
        hl.errors.NoMatchError,
        KeyError,
        r"'inner\.\*'.*exclude='inner\.\*' takes all",
    ),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_input_is_refused_in_words_and_leaves_nothing(case):
    """Each is an error of ours and the built-in, says asked, found and next, and nothing is attached."""
    arguments, options, ours, builtin, message = BAD[case]
    model = make_model()
    with pytest.raises(ours) as caught:
        hl.attach(model, *arguments, **options)
    assert isinstance(caught.value, builtin)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert_untouched(model)


@pytest.mark.parametrize("case", ["unknown kind", "with_kwargs on a backward hook", "a hook that takes too little"])
def test_attach_everywhere_refuses_the_same_and_leaves_nothing(case):
    """Bad input to the process-wide verb leaves no global hook behind."""
    (_, bad_hook), options, ours, _, message = BAD[case]
    with pytest.raises(ours, match=message):
        hl.attach_everywhere(bad_hook, **options)
    assert not torch.nn.modules.module._has_any_global_hook()


def test_a_script_module_is_refused_and_nothing_else_is_hooked():
    """Where a scripted part is asked for by name, nothing is hooked (a glob that meets one warns and leaves it out)."""
    with pytest.warns(DeprecationWarning, match="script"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2), scripted)
    with pytest.raises(hl.errors.UnhookableError, match=r"ScriptModule.*before it is scripted") as caught:
        hl.attach(model, ["0", "1"], hook)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, RuntimeError)
    assert hl.attached(model) == []
    for module in (model, model[0]):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("thing", [None, 3, torch.ones(1), nn.Linear, [nn.ReLU()]])
def test_something_that_is_no_module_is_refused(thing):
    """attach says what it got instead of a module."""
    with pytest.raises(hl.errors.UnhookableError, match=r"A torch\.nn\.Module is needed, got") as caught:
        hl.attach(thing, "*", hook)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("forgotten", ["inner", nn.Linear, (nn.Linear, nn.ReLU), re.compile("inner")])
def test_a_forgotten_hook_is_not_taken_for_one(forgotten):
    """``attach(model, nn.Linear)`` is an attach without a hook, not the class as a hook."""
    model = make_model()
    with pytest.raises(hl.errors.HookSignatureError):
        hl.attach(model, forgotten)
    assert_untouched(model)


def test_a_pre_hook_with_kwargs_that_returns_nonsense_is_named():
    """The error of a bad return names the hook, the module and what was expected."""
    model = make_model()

    def bad_return(module, args, kwargs):
        return args

    with (
        hl.attach(model, "outer", bad_return, on="forward_pre", with_kwargs=True),
        pytest.raises(hl.errors.HookReturnError, match=r"bad_return.*'outer'.*\(new_args, new_kwargs\)") as caught,
    ):
        model(torch.ones(1, 2))
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("nonsense", "a str"),
        ((), "tuple of 1.*got 0"),
        ((torch.ones(3, 3),), r"shape \(3, 3\)"),
        ((torch.ones(1, 2, dtype=torch.float64),), "float64"),
        (("x",), "entry 0 is a str"),
    ],
)
def test_a_gradient_hook_that_returns_a_misfit_is_named(value, words):
    """A gradient of the wrong number, shape, dtype or type is refused with the hook's name."""
    model = make_model()

    def misfit(module, grad_input, grad_output):
        return value

    with hl.attach(model, "outer", misfit, on="backward"):
        output = model(torch.ones(1, 2))
        with pytest.raises(hl.errors.HookReturnError, match=rf"misfit.*'outer'.*{words}"):
            output.sum().backward()


def test_hooks_left_are_listed_by_module_and_hook():
    """assert_no_hooks names what it found and where to look."""
    model = make_model()
    expected = pytest.raises(hl.errors.HooksLeftError, match=r"1 hooks? .*outer: hook \(forward\).*hookline\.attached")
    with hl.attach(model, "outer", hook), expected:
        hl.assert_no_hooks(model)
    assert_untouched(model)


def test_without_strict_a_missing_target_warns_and_the_handle_is_on_nothing():
    """strict=False turns the no-match error into a warning with the same words."""
    model = make_model()
    with pytest.warns(hl.HooklineWarning, match=r"No module matches 'outr'.*nearest"):
        handle = hl.attach(model, "outr", hook, strict=False)
    assert handle.report().matched == 0
    handle.remove()
    assert_untouched(model)


def test_a_hint_is_said_in_the_words_of_who_reads_the_error():
    """Python's by default; a shell has its own for every hint; over HTTP there is none but where a route answers it."""
    for hint in Hint:
        error = errors.NoMatchError("Nothing is here.", hint=hint)
        assert str(error) == f"Nothing is here. {hint.value}"
        assert shell_text(error, "a model").startswith("Nothing is here. ")
        assert hint.value not in shell_text(error)
        assert refusal_from_error(error).message == "Nothing is here."
        assert refusal_from_error(error, {hint: "See GET /here."}).message == "Nothing is here. See GET /here."
        assert pickle.loads(pickle.dumps(error)).text({hint: "Look."}) == "Nothing is here. Look."
        assert copy.copy(error).hint is hint
        warning = errors.HooklineWarning("Nothing is here.", hint=hint)
        assert shell_text(warning) == shell_text(error)
