"""Hold a step's gradients after the host has cleared them, so that hooks after the step still find them in ``.grad``.

`HostRun` calls it for hosts that clear gradients before they say that a step is over. Nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

__all__ = ["HeldGradients"]


class HeldGradients:
    """Keep the gradient tensors of a model, and show them in ``.grad`` where the host has set that to None."""

    def __init__(self) -> None:
        self._held: list[tuple[nn.Parameter, Tensor]] = []

    def take(self, model: nn.Module) -> None:
        """Hold the gradients that there are now."""
        self._held = [(parameter, grad) for parameter in model.parameters() if (grad := parameter.grad) is not None]

    def state_dict(self, model: nn.Module) -> dict[int, Tensor]:
        """Return the gradients that are held, by the place of their parameter in the model."""
        held = {id(parameter): grad for parameter, grad in self._held}
        return {place: held[id(p)] for place, p in enumerate(model.parameters()) if id(p) in held}

    def load_state_dict(self, model: nn.Module, state: Mapping[int, Tensor]) -> None:
        """Hold what ``state_dict`` returned."""
        parameters = list(model.parameters())
        self._held = [(parameters[place], grad.to(parameters[place].device)) for place, grad in state.items()]

    def release(self) -> None:
        """Let go of them: their memory is the host's again."""
        self._held = []

    def __bool__(self) -> bool:
        return bool(self._held)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Put them into ``.grad`` for as long as the block lasts, where there is no gradient now."""
        cleared = [(parameter, grad) for parameter, grad in self._held if parameter.grad is None]
        for parameter, grad in cleared:
            parameter.grad = grad
        try:
            yield
        finally:
            for parameter, _ in cleared:
                parameter.grad = None
