"""Keeping the gradients of named modules in bounds, or away.

Takes the modules from ``select``; hooks their parameters (after accumulation) and, for clipping, the gradients
that leave them towards their inputs. Nothing else in the model is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, linalg

from hookline.errors import OptionError
from hookline.sites.attach import attach
from hookline.sites.handle import HandleSet
from hookline.sites.kinds import Kind
from hookline.sites.select import select

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from hookline.types import Grads, Target

__all__ = ["ParameterHook", "clip_gradients", "freeze"]


def clip_gradients(
    model: nn.Module, target: Target = None, *, value: float | None = None, norm: float | None = None
) -> HandleSet:
    """Bound the gradients of the named modules, tensor by tensor.

    Recipe::

        with hookline.clip_gradients(model, "layers.#", value=1.0):
            loss.backward()

    Bounded are the ``.grad`` of every parameter of those modules (children included), each time a backward
    has accumulated into it, and the gradient each of those modules sends to its inputs. ``value`` clamps every
    element to ±value; ``norm`` scales a tensor down to that 2-norm if it is above.
    """
    if (value is None) == (norm is None):
        raise OptionError("clip_gradients takes either value= or norm=.")
    bound = value if value is not None else norm
    if not isinstance(bound, int | float) or not bound > 0:
        raise OptionError(f"clip_gradients needs a bound above 0, got {bound!r}.")
    clip = _clamp(bound) if value is not None else _shrink(bound)

    def clip_inputs(module: nn.Module, grad_input: Grads, grad_output: Grads) -> Grads:
        return tuple(None if grad is None else clip(grad) for grad in grad_input)

    def clip_parameter(parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is not None and grad.is_sparse:
            parameter.grad = grad.coalesce()
            parameter.grad.values().copy_(clip(parameter.grad.values()))
        elif grad is not None:
            grad.copy_(clip(grad))

    on_modules = attach(model, target, clip_inputs, on=Kind.BACKWARD, name="clip_gradients")
    handles = _hook_parameters(_parameters(model, target), ParameterHook("clip_gradients", clip_parameter))
    handles.add(on_modules)
    return handles


def freeze(model: nn.Module, target: Target = None) -> HandleSet:
    """Keep the parameters of the named modules as they are, without touching gradients anywhere else.

    Recipe::

        with hookline.freeze(model, "backbone"):
            train(model)

    Their ``.grad`` is dropped now, and whenever a backward has filled it, and does not come back; so no optimizer
    moves them, by momentum or weight decay neither. What flows through the modules to those below is unchanged. A
    weight that another module shares is frozen there too; buffers, such as BatchNorm's statistics, still move.
    """
    parameters = _parameters(model, target)
    for parameter in parameters:
        _drop_gradient(parameter)
    return _hook_parameters(parameters, ParameterHook("freeze", _drop_gradient))


class ParameterHook:
    """A hook of ours on parameters, which `find` and `assert_no_hooks` know by its class."""

    __slots__ = ("hook", "name")

    def __init__(self, name: str, hook: Callable[[Tensor], None]) -> None:
        self.name = name
        self.hook = hook

    def __call__(self, parameter: Tensor) -> None:
        self.hook(parameter)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _hook_parameters(parameters: list[nn.Parameter], hook: ParameterHook) -> HandleSet:
    return HandleSet(
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        for parameter in parameters
        if parameter.requires_grad
    )


def _parameters(model: nn.Module, target: Any) -> list[nn.Parameter]:
    """The parameters of the named modules, each once."""
    found = {id(parameter): parameter for _, module in select(model, target) for parameter in module.parameters()}
    return list(found.values())


def _clamp(bound: float) -> Callable[[Tensor], Tensor]:
    return lambda grad: grad.clamp(-bound, bound)


def _shrink(bound: float) -> Callable[[Tensor], Tensor]:
    def shrink(grad: Tensor) -> Tensor:
        # In float32, as the norm of half-precision gradients may not fit into theirs; no host sync. A tensor
        # within the bound is multiplied by exactly 1.
        norm = linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
        scale = (bound / norm.clamp_min(1e-38)).clamp_max(1.0)
        shrunk: Tensor = (grad.to(norm.dtype) * scale).to(grad.dtype)
        return shrunk

    return shrink
