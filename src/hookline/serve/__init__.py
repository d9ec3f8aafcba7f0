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

from hookline._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
