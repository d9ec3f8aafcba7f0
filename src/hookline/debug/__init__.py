"""Find where two runs part: write a trace of a model, read it, and compare it with another.

Recipe::

    with hookline.trace(model, to="trace"):
        model(batch)
    folder = hookline.debug.read_trace("trace")
    for record in folder.records:
        print(record.site, record.kind, record.call, record.fingerprint.norm)

Names are imported when first used.
"""

from __future__ import annotations

from hookline._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
