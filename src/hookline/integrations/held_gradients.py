"""Hold a step's gradients after the host has cleared them, so that hooks after the step still find them in ``.grad``.

`HostRun` calls it for hosts that clear gradients before they say that a step is over. Nothing is copied, unless the
next step needs these gradients and the host may clear them in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

__all__ = ["HeldGradients"]


class HeldGradients:
    """Keep the gradient tensors of a model, and show them in ``.grad`` after the host has cleared them."""

    def __init__(self) -> None:
        self._held: list[tuple[nn.Parameter, Tensor | None]] = []

    def take(self, model: nn.Module) -> None:
        """Hold the gradients that there are now."""
        self._held = [(parameter, grad) for parameter in model.parameters() if (grad := parameter.grad) is not None]

    def copy(self, model: nn.Module, *, none: bool = False) -> None:
        """Hold copies of them, and remember which parameters have none; or that no parameter has any (``none``)."""
        self._held = [
            (parameter, None if none or parameter.grad is None else parameter.grad.detach().clone())
            for parameter in model.parameters()
        ]

    def state_dict(self, model: nn.Module) -> dict[int, Tensor]:
        """Return the gradients that are held, by the place of their parameter in the model."""
        held = {id(parameter): grad for parameter, grad in self._held if grad is not None}
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
    def shown(self, *, in_place_of_others: bool = False) -> Iterator[None]:
        """Put them into ``.grad`` for as long as the block lasts, where there is no gradient now.

        ``in_place_of_others``: also where there is one, of the step that is being made; or zeros in the same tensor.
        """
        others = [
            (parameter, parameter.grad, grad)
            for parameter, grad in self._held
            if parameter.grad is None or in_place_of_others
        ]
        for parameter, _, grad in others:
            parameter.grad = grad
        try:
            yield
        finally:
            for parameter, own, _ in others:
                parameter.grad = own
