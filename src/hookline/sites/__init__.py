"""Put hooks on places of a model: modules, functions, gradients, tensors, optimizers."""

from __future__ import annotations

from hookline._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
