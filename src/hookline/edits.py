"""Give the edits for `hookline.patch` their public names: an edit says what becomes of an activation.

Users call these as ``hookline.edits.NAME``. They are written in observe/patching.py, whose head says what a new one
needs there. Besides, it is listed twice here, behind ``edits:`` in tests/test_public_names.py, and in the pages about
edits: docs/tour.md, and docs/roles.md if it takes ``head=``. Tests: tests/observe/patch.

Recipe::

    with hl.patch(model, {"layers.3": hl.edits.ablate()}):
        model(x)
"""

from __future__ import annotations

from hookline.observe.patching import Edit, ablate, mean_ablate, replace, scale, steer, swap

__all__ = ["Edit", "ablate", "mean_ablate", "replace", "scale", "steer", "swap"]
