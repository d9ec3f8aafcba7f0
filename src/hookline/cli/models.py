"""Find the model that a name on the command line means, for the commands ``find``, ``check`` and ``doctor``.

They call `model_at` with ``path/file.py:Name``, ``package.module:Name`` or the folder of
a saved model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hookline.errors import OptionError
from hookline.load import load_object, without_arguments

__all__ = ["model_at"]


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
