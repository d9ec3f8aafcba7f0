"""The public names of ``hookline.testing``, each with the module it lives in."""

from hookline.testing.checking import Finding as Finding
from hookline.testing.checking import HookCheck as HookCheck
from hookline.testing.checking import check_hook as check_hook
from hookline.testing.checking import small_experiment as small_experiment

__all__: list[str]
