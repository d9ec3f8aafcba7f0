"""The public names of the edits for `hookline.patch`: what becomes of an activation.

They are written in ``observe/patching.py``, which says what a new one needs; it is listed here twice.

Recipe::

    with hl.patch(model, {"layers.3": hl.edits.ablate()}):
        model(x)
"""

from __future__ import annotations

from hookline.observe.patching import Edit, ablate, mean_ablate, replace, scale, steer, swap

__all__ = ["Edit", "ablate", "mean_ablate", "replace", "scale", "steer", "swap"]
