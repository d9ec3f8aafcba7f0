"""The public names of ``hookline.observe``, each with the module it lives in."""

from hookline.observe.capturing import Cache as Cache
from hookline.observe.capturing import Captured as Captured
from hookline.observe.heat_map import HeatMap as HeatMap
from hookline.observe.patching import Patch as Patch
from hookline.observe.watch.watch import Watch as Watch

__all__: list[str]
