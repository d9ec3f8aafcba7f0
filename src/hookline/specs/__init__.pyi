"""The public names of ``hookline.specs``, each with the module it lives in."""

from hookline.specs.apply_specs import register_hooks as register_hooks
from hookline.specs.hook_spec import HookSpec as HookSpec
from hookline.specs.hook_spec import resolve_callable as resolve_callable

__all__: list[str]
