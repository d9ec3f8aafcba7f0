"""SGLang's names for hooks on a served model: `ServerArgs`, `ModelRunner`; and its dumps of tensors."""

from __future__ import annotations

from hookline._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
