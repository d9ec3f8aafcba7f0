"""Define the errors and warnings of hookline: each says what was asked, what was found, and what to do next.

Most folders raise them. Each is also the built-in error that a caller would expect, so ``except KeyError`` catches a
mistyped name given to ``attach``. cli/main.py prints them. ``refusal_from_error`` of serve/http/error_answers.py turns
some classes into HTTP codes, and all others into 400. engines/vllm/vllm_hooks.py finds a class by its name.

A new error needs: a built-in base; a line in the tree below; a section of docs/errors.md with its name as the heading,
in alphabetical order, to which `help_line` leads; a line in ``BUILTINS`` of tests/test_errors.py; a word in ``ERRORS``
of tests/test_public_names.py, behind ``errors:``, and behind the package whose stub (``__init__.pyi``) exports it, if
one does; and a code in ``refusal_from_error`` if 400 is wrong. A new warning derives from `HooklineWarning`. It needs
the section, a word in ``WARNINGS`` of tests/test_public_names.py, and a word in the set that
``test_every_error_of_the_module_is_public_and_has_a_builtin`` (tests/test_errors.py) adds to ``BUILTINS``. Errors end
with their address by themselves. A warning has no notes, so who warns puts `help_line` into the text, if it is to be
there (as sites/receipt.py).

    HooklineError
    ├── NoMatchError        KeyError             a target that selects nothing
    ├── TargetError         ValueError           an empty target, or one of another model
    ├── KindError           ValueError           an unknown kind of hook
    ├── OptionError         ValueError TypeError an option with a wrong value, or that does not go with the others
    │   └── MissingPackageError  ImportError     an option that needs a package which is not installed
    ├── HookSignatureError  TypeError            a hook that cannot take what the kind hands over
    ├── UnhookableError     TypeError RuntimeError  a module that Python hooks cannot reach
    ├── HookReturnError     RuntimeError         a return value that cannot replace what the hook was shown
    ├── ScopeError          RuntimeError         scopes that are entered or left when they may not be
    ├── CaptureError        RuntimeError         something captured that cannot be kept, or cannot be read
    ├── CompareError        ValueError           two runs of which nothing can be compared
    ├── TraceError          RuntimeError         a trace that cannot be written, or cannot be read
    ├── GuardError          RuntimeError         what cannot be guarded, or a hook that broke its promise
    ├── HookNameError       ValueError           a hook that is not known by that name, or not the only one
    ├── MetricError         TypeError            a metric that nothing can write down
    ├── LifecycleError      RuntimeError         a moment of a run that is told out of turn
    ├── ConfigError         ValueError           a file of settings that does not say what can be done
    ├── NotAllowedError     PermissionError      a path to code that configuration may not name
    ├── CheckpointError     RuntimeError         a checkpoint that cannot be written, or cannot be read
    ├── ResumeError         RuntimeError         a run that cannot go on from what was saved
    ├── RankError           RuntimeError         ranks that did not come, or that do not fit together
    ├── EngineBusy          RuntimeError         a served model that has no room for one more request
    ├── EngineClosed        RuntimeError         a served model that takes no more requests
    ├── NonFiniteError      FloatingPointError   NaN or infinity, where a hook was told to stop there
    ├── HookCheckError      AssertionError       a hook that does not do what hooks promise
    └── HooksLeftError      AssertionError       hooks where none were expected

    HooklineWarning         UserWarning          every warning of hookline
    └── HookNeverFired                           a hook that came off without having fired
"""

from __future__ import annotations

from typing import Final

DOCUMENTATION: Final = "https://github.com/hookline/hookline/blob/main/docs"
"""Where the pages are, for `help_line`. pyproject.toml and SECURITY.md have the address of the repository too: change
them together."""


def help_line(error: type[BaseException] | type[Warning]) -> str:
    """Return the line that leads to the section about ``error``, or about the nearest of its bases in this file."""
    known = next(base.__name__ for base in error.__mro__ if base.__module__ == __name__)
    return f"See {DOCUMENTATION}/errors.md#{known.lower()}"


class _Said(Exception):
    """Base of errors and warnings: what one says is its first argument."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError shows the repr of its argument, in quotes


class HooklineError(_Said):
    """Base of every error that hookline raises on purpose; a traceback ends with the address of its section."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(help_line(type(self)))  # a note: str(error) stays one sentence, for logs and answers over HTTP


class NoMatchError(HooklineError, KeyError):
    """No module answers to the target; the message names the nearest ones."""


class TargetError(HooklineError, ValueError):
    """The target is empty, or belongs to another model."""


class KindError(HooklineError, ValueError):
    """There is no such kind of hook."""


class OptionError(HooklineError, ValueError, TypeError):
    """An option has a wrong value, or does not go with the others; the message names it and what it takes."""


class MissingPackageError(OptionError, ImportError):
    """Something is asked for that an optional package does; the message has the line that installs it."""


class HookSignatureError(HooklineError, TypeError):
    """The hook is not callable, or cannot take the arguments of its kind."""


class UnhookableError(HooklineError, TypeError, RuntimeError):
    """Python hooks cannot run in this module (a ScriptModule, say)."""


class HookReturnError(HooklineError, RuntimeError):
    """A hook returned a value that cannot replace the one it received (wrong type or structure)."""


class ScopeError(HooklineError, RuntimeError):
    """A scope is entered after its removal or inside of another, or left without having been entered."""


class CaptureError(HooklineError, RuntimeError):
    """What is asked of a capture cannot be had: too large, called several times, overwritten since."""


class CompareError(HooklineError, ValueError):
    """Nothing of two runs can be compared, or a swap finds no guilty module; the message says why."""


class TraceError(HooklineError, RuntimeError):
    """A folder that cannot take a trace, or that holds none that can be read; the message names it."""


class HookNameError(HooklineError, ValueError):
    """No hook is known by that name, or several are; the message lists the names there are."""


class MetricError(HooklineError, TypeError):
    """A hook returned something that no sink can write; the message names the hook and the metric."""


class LifecycleError(HooklineError, RuntimeError):
    """A point of a run was fired out of turn, or a hook asked for what the run does not have (a loss, a batch)."""


class ConfigError(HooklineError, ValueError):
    """A file of settings cannot be read, or has an unknown key or value; the message names the line."""


class NotAllowedError(HooklineError, PermissionError):
    """Configuration names code that is not on the list of what it may name."""


class GuardError(HooklineError, RuntimeError):
    """Something cannot be restored, or a hook changed what it had declared not to change."""


class CheckpointError(HooklineError, RuntimeError):
    """A value that no checkpoint can hold, or a file that is none, or is damaged; the message names it."""


class ResumeError(HooklineError, RuntimeError):
    """A run cannot go on from what was saved: another model, other settings, or someone else is at it."""


class RankError(HooklineError, RuntimeError):
    """Ranks of a distributed run did not come, failed, or do not fit together; the message names them."""


class EngineBusy(HooklineError, RuntimeError):
    """As many requests wait as may wait; ask again later."""


class EngineClosed(HooklineError, RuntimeError):
    """The engine has not been started, is closing, or has closed."""


class NonFiniteError(HooklineError, FloatingPointError):
    """A module gave out NaN or infinity, and a hook was told to stop there; the message names it."""


class HookCheckError(HooklineError, AssertionError):
    """``hookline.testing.check_hook`` found something; the message lists all of it."""


class HooksLeftError(HooklineError, AssertionError):
    """Hooks are attached where ``assert_no_hooks`` expected none."""


class HooklineWarning(_Said, UserWarning):
    """Base of every warning that hookline gives."""


class HookNeverFired(HooklineWarning):
    """A hook came off without having fired once, although its model ran."""
