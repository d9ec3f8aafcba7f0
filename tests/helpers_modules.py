"""Small modules, and a check that a model carries no hook; several folders of tests use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

__all__ = ["HOOK_DICTS", "Returns", "assert_untouched"]

HOOK_DICTS = [
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
]


GLOBAL_DICTS = [
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_with_kwargs",
    "_global_forward_hooks_always_called",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
]


class Returns(nn.Module):
    """Returns whatever its function makes of the input, or of what a linear layer of these sizes makes of it."""

    def __init__(self, make: Callable[[Any], Any], *sizes: int) -> None:
        super().__init__()
        self.make = make
        self.layer = nn.Linear(*sizes) if sizes else None

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.make(x if self.layer is None else self.layer(x))


def assert_untouched(model: nn.Module) -> None:
    """Assert that every hook dictionary of every module is empty, and nothing else of ours is on the instance."""
    plain = vars(nn.Linear(1, 1))
    for name, module in model.named_modules():
        for attribute in HOOK_DICTS:
            assert not getattr(module, attribute), (name, attribute)
        assert module._is_full_backward_hook == plain["_is_full_backward_hook"], name
        assert "_call_impl" not in vars(module), name
        assert "forward" not in vars(module), name
    for attribute in GLOBAL_DICTS:
        assert not getattr(torch_module, attribute), attribute
