"""Serve a model: hooks described as data at its start, and on the running model over HTTP.

Recipe::

    model, tokenizer = hookline.serve.load("models/tiny", device="cpu")
    settings = hookline.serve.Settings(model_name="tiny", token="secret")
    server = hookline.serve.Server(lambda: hookline.serve.Engine(model, tokenizer), settings)
    server.start()
    print(server.url)
    server.stop()

``hookline serve --model models/tiny`` does the same as a process. Names are imported when first used; a `Server` needs
``hookline[serve]``, an `Engine` alone needs transformers.
"""

from __future__ import annotations

from typing import Any

from hookline._lazy import lazy_names
from hookline.errors import MissingPackageError

_find_name, __dir__, __all__ = lazy_names(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _find_name(name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"hookline.serve.{name} needs {error.name}, not installed here: pip install 'hookline[serve]'."
        ) from error
