"""Small modules, and a check that a model carries no hook; several folders of tests use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import hookline as hl

__all__ = ["Returns", "assert_untouched"]


class Returns(nn.Module):
    """Returns whatever its function makes of the input, or of what a linear layer of these sizes makes of it."""

    def __init__(self, make: Callable[[Any], Any], *sizes: int) -> None:
        super().__init__()
        self.make = make
        self.layer = nn.Linear(*sizes) if sizes else None

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.make(x if self.layer is None else self.layer(x))


def assert_untouched(model: nn.Module) -> None:
    """Assert that torch's dictionaries of hooks are empty, and that nothing of ours is on the model or its process."""
    hl.assert_no_hooks(model, foreign=True)
    plain = vars(nn.Linear(1, 1))
    for name, module in model.named_modules():
        added = {attribute for attribute in ("_call_impl", "forward") if attribute in vars(module)}
        filled = {key for key, value in vars(module).items() if "hooks" in key and isinstance(value, dict) and value}
        assert added | filled == set(), name
        assert module._is_full_backward_hook == plain["_is_full_backward_hook"], name
    dictionaries = {key: value for key, value in vars(torch_module).items() if key.startswith("_global_")}
    assert [key for key, value in dictionaries.items() if isinstance(value, dict) and value] == []
