"""Edits for `hookline.patch`: what becomes of an activation.

Recipe::

    with hl.patch(model, {"layers.3": hl.edits.ablate()}):
        model(x)
"""

from __future__ import annotations

from hookline.observe.patch.edit import Edit as Edit
from hookline.observe.patch.given_edits import ablate as ablate
from hookline.observe.patch.given_edits import replace as replace
from hookline.observe.patch.given_edits import scale as scale
from hookline.observe.patch.given_edits import steer as steer
from hookline.observe.patch.recorded_edits import mean_ablate as mean_ablate
from hookline.observe.patch.recorded_edits import swap as swap
