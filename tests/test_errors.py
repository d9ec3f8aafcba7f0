"""The errors: each is ours and the built-in one would guess, and each message says asked, found, next."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest
from helpers_modules import assert_untouched
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


@pytest.mark.parametrize(("name", "builtins"), sorted(BUILTINS.items()))
def test_each_error_is_also_the_builtin_one_would_guess(name, builtins):
    """``except KeyError`` around a mistyped name does what it looks like."""
    error = getattr(errors, name)
    assert issubclass(error, hl.HooklineError)
    for builtin in builtins:
        assert issubclass(error, builtin)


def test_every_error_of_the_module_has_a_builtin():
    """No error class is missing from the table above."""
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, hl.HooklineError) and value is not hl.HooklineError
    }
    assert classes == set(BUILTINS)


@pytest.mark.parametrize("name", sorted(BUILTINS))
def test_each_error_prints_its_sentence_unquoted_and_survives_pickling(name):
    """``str`` is the sentence, not its repr, also after a trip through another process."""
    error = getattr(errors, name)("No module matches 'a'.")
    assert str(error) == "No module matches 'a'."
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


# -- bad input: what is refused, as what, with which words, and that nothing stays attached -------------------


BAD = {
    "unknown kind": (("*", hook), {"on": "foward"}, errors.KindError, r"'foward'.*[Nn]earest: 'forward'.*Kinds: "),
    "with_kwargs on a backward hook": (
        ("*", hook),
        {"on": "backward", "with_kwargs": True},
        errors.OptionError,
        r"with_kwargs.*'backward'.*goes with forward, forward_pre",
    ),
    "always_call on a pre-hook": (
        ("*", lambda module, args: None),
        {"on": "forward_pre", "always_call": True},
        errors.OptionError,
        r"always_call.*'forward_pre'.*goes with forward",
    ),
    "a hook that is not callable": (("*", "print"), {}, errors.HookSignatureError, r"callable.*'print'"),
    "a mistyped name": (
        ("outr.*", hook),
        {},
        errors.NoMatchError,
        r"No module matches 'outr\.\*'.*nearest: .*'outer'.*hookline\.find",
    ),
    "a type the model does not have": (
        (nn.Conv2d, hook),
        {},
        errors.NoMatchError,
        r"is a Conv2d; it has Sequential ×2, Linear ×2, ReLU ×1",
    ),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_input_is_refused_in_words_and_leaves_nothing(case):
    """Each says asked, found and next, and nothing is attached."""
    arguments, options, ours, message = BAD[case]
    model = make_model()
    with pytest.raises(ours, match=message):
        hl.attach(model, *arguments, **options)
    assert_untouched(model)


@pytest.mark.parametrize("forgotten", ["inner", nn.Linear, (nn.Linear, nn.ReLU), re.compile("inner")])
def test_a_forgotten_hook_is_not_taken_for_one(forgotten):
    """``attach(model, nn.Linear)`` is an attach without a hook, not the class as a hook."""
    model = make_model()
    with pytest.raises(errors.HookSignatureError):
        hl.attach(model, forgotten)
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
