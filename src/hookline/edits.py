"""Edits for `hookline.patch`: what becomes of an activation.

Recipe::

    with hl.patch(model, {"layers.3": hl.edits.ablate()}):
        model(x)
"""

from __future__ import annotations

from hookline.observe.patch.edits import Edit as Edit
from hookline.observe.patch.edits import ablate as ablate
from hookline.observe.patch.edits import mean_ablate as mean_ablate
from hookline.observe.patch.edits import replace as replace
from hookline.observe.patch.edits import scale as scale
from hookline.observe.patch.edits import steer as steer
from hookline.observe.patch.edits import swap as swap
