"""Make hooks to try specs with: each call of such a hook is added to `HOOK_CALLS`.

Specs in tests name it: ``"hookline.testing.model_hooks:dummy_hook_factory"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

HOOK_CALLS: list[dict[str, Any]] = []
"""One entry for each call: ``module_type``, ``tag`` and ``shape``. A test clears it before it begins."""


def dummy_hook_factory(config: Mapping[str, Any]) -> Callable[[Any, Any, Any], Any]:
    """Make a forward hook that adds the type of the module, its ``tag`` and the output's shape to `HOOK_CALLS`.

    Recipe::

        HOOK_CALLS.clear()
        spec = {
            "target_modules": ["outer.0"],
            "hook_factory": "hookline.testing.model_hooks:dummy_hook_factory",
            "config": {"tag": "outer"},
        }
        with hookline.register_hooks(model, [spec]):
            model(x)
        assert HOOK_CALLS == [{"module_type": "Linear", "tag": "outer", "shape": (3, 4)}]

    Args:
        config: ``tag``, which is ``"default"`` if left out.
    """
    tag = config.get("tag", "default")

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        shape = tuple(output.shape) if hasattr(output, "shape") else None
        HOOK_CALLS.append({"module_type": type(module).__name__, "tag": tag, "shape": shape})
        return output

    return hook
