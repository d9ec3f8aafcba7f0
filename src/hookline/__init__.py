"""hookline: one hook system for PyTorch.

Recipe::

    import hookline as hl

    with hl.attach(model, "layers.#", lambda module, args, output: print(output.shape)) as handle:
        model(x)
    print(handle.report())

Names are imported when first used, so ``import hookline`` costs next to nothing and does not import torch.
"""

from __future__ import annotations

from hookline._lazy import lazy_names

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
__all__ += ["__version__"]
