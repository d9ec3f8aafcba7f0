"""``hookline find FILE:MODEL [PATTERN]``: the modules that a pattern matches, without running anything.

Takes a model by name, prints the table of `hookline.find`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional, arg

from hookline.cli.error_messages import DONE
from hookline.cli.load_object import load_object
from hookline.cli.parse import parse
from hookline.cli.printing import tell
from hookline.errors import NoMatchError, OptionError

__all__ = ["FindOptions", "command", "in_shell", "model_at"]


@dataclass
class FindOptions:
    """Show the modules of a model that a pattern matches, with type, parameters and hooks.

    Examples:
      hookline find my_file.py:make_model
      hookline find my_file.py:MyModel 'layers.#.mlp'     # # is a number, * crosses dots
      hookline find mod_arithmetic '*.mlp.*'
    """

    model: Annotated[Positional[str], arg(metavar="FILE:MODEL", help_behavior_hint="")]
    """A model, its class, or a function that makes one: file.py:NAME or package.module:NAME; also an experiment."""
    pattern: Annotated[Positional[str], arg(metavar="[PATTERN]", help_behavior_hint="")] = "*"
    """Which modules; all if left out."""
    exclude: Annotated[str | None, arg(metavar="PATTERN", help_behavior_hint="")] = None
    """Which of these not."""


def command(arguments: Sequence[str]) -> int:
    """Print the table."""
    options = parse(FindOptions, arguments, "find")
    from hookline.sites.find import find

    model = model_at(options.model)
    try:
        tell(repr(find(model, options.pattern, exclude=options.exclude)))
    except NoMatchError as error:
        raise NoMatchError(in_shell(error, options.model)) from None
    return DONE


def in_shell(error: NoMatchError, model: str = "EXPERIMENT") -> str:
    """Return the text of an error with the command that lists the modules of ``model``, in place of Python."""
    from hookline.sites.targets import SEE_ALL

    return str(error).replace(SEE_ALL, f"See all: hookline find {shlex.quote(model)}")


def model_at(path: str) -> Any:
    """The model that a name stands for: itself, made by its class or a function, or that of an experiment."""
    from torch import nn

    from hookline.experiments import EMBEDDED

    thing = load_object(EMBEDDED.get(path, path), wanted="a model")
    if not isinstance(thing, nn.Module) and callable(thing):
        thing = _made(thing, path)
    model = thing if isinstance(thing, nn.Module) else getattr(thing, "model", None)
    if not isinstance(model, nn.Module):
        raise OptionError(f"{path} gives {thing!r}, and a model is an nn.Module.")
    return model


def _made(thing: Any, path: str) -> Any:
    from hookline.training.loops.experiment import Experiment

    if isinstance(thing, type) and issubclass(thing, Experiment) and thing is not Experiment:
        config = None if thing.config_class is None else thing.config_class()
        strategies = thing.strategies or ("default",)
        return thing(config, strategies[0])  # type: ignore[arg-type]
    try:
        return thing()
    except TypeError as error:
        if "argument" not in str(error) or error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise
        raise OptionError(f"{path} cannot be called without arguments ({error}); name a function that can.") from None
