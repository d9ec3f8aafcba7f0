"""Show the modules of a model that a pattern matches: ``hookline find MODEL [PATTERN]``.

`main` calls `find`, which makes the model and prints the table of `hookline.find`; `check` and `doctor` find their
model by `model_at` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from hookline.cli.main import DONE
from hookline.cli.screen import shell_text, tell_found
from hookline.errors import NoMatchError, OptionError
from hookline.load import load_object, without_arguments
from hookline.runs.flags import Show, parse

__all__ = ["FindOptions", "find", "model_at"]


@dataclass
class FindOptions:
    """Show the modules of a model that a pattern matches, with type, parameters and hooks.

    Examples:
      hookline find my_file.py:make_model
      hookline find my_file.py:MyModel 'layers.#.mlp'     # # is a number, * crosses dots
      hookline find mod_arithmetic '*.mlp.*'
      hookline find models/llama 'role:attn'              # a folder of transformers: its config.json is enough
    """

    model: Annotated[str, Show("FILE:MODEL", is_word=True)]
    """A model, its class, or a function that makes one: file.py:NAME or package.module:NAME; also an experiment, or the
    folder of a saved model."""
    pattern: Annotated[str, Show("[PATTERN]", is_word=True)] = "*"
    """Which modules; all if left out."""
    exclude: Annotated[str | None, Show("PATTERN")] = None
    """Which of these not."""
    json: bool = False
    """Print JSON."""


def find(arguments: Sequence[str]) -> int:
    """Print the table."""
    options = parse(FindOptions, arguments, "find")
    from hookline.sites import find as sites

    model = model_at(options.model)
    try:
        found = sites.find(model, options.pattern, exclude=options.exclude)
    except NoMatchError as error:
        raise NoMatchError(shell_text(error, options.model)) from None
    modules = [
        {"name": site.name, "type": site.type, "parameters": site.num_parameters, "hooks": found.hooks(site)}
        for site in found
    ]
    tell_found("find", {"modules": modules}, found, as_json=options.json)
    return DONE


# -- the model -------------------------------------------------------------------------------------------------


def model_at(path: str) -> Any:
    """Return the model that a path names: itself, made by its class or a function, or that of an experiment.

    Of the folder of a model that transformers has saved, return the model without its weights.
    """
    from torch import nn

    from hookline.runs.find import EMBEDDED

    if path not in EMBEDDED and Path(path).expanduser().is_dir():
        from hookline.serve.load_model import make_empty

        return make_empty(Path(path).expanduser())
    thing = load_object(EMBEDDED.get(path, path), wanted="a model")
    if not isinstance(thing, nn.Module) and callable(thing):
        with without_arguments(path):
            thing = _made_model(thing, path)
    model = thing if isinstance(thing, nn.Module) else getattr(thing, "model", None)
    if not isinstance(model, nn.Module):
        raise OptionError(f"{path} gives {thing!r}, and a model is an nn.Module.")
    return model


def _made_model(thing: Any, path: str) -> Any:
    from hookline.training.experiment import Experiment

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
