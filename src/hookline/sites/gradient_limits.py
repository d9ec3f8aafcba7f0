"""Bound the gradients of named modules, or drop them: ``clip_gradients`` and ``freeze``.

Only users call these. Both hook the parameters of the modules (``param_grad``); clipping also hooks the gradients that
the modules send to their inputs (``backward``). Nothing else in the model is touched. Read no number on the host here:
that would wait for the device at every gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, linalg

from hookline.errors import OptionError
from hookline.sites.attach import attach, new_attachment
from hookline.sites.handle import HandleSet, HookHandle
from hookline.sites.hook_at_site import AttachOptions
from hookline.sites.kinds import Kind
from hookline.sites.parameters import NamedParameter, attach_to_parameters, is_below, named_parameters
from hookline.sites.targets import select

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from hookline.hook_types import Grads, Hook, Target


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
    clip = _shrink(bound) if value is None else lambda grad: grad.clamp(-bound, bound)

    def clip_inputs(module: nn.Module, grad_input: Grads, grad_output: Grads) -> Grads:
        return tuple(None if grad is None else clip(grad) for grad in grad_input)

    def clip_parameter(parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is not None and grad.is_sparse:
            parameter.grad = grad.coalesce()
            parameter.grad.values().copy_(clip(parameter.grad.values()))
        elif grad is not None:
            grad.copy_(clip(grad))

    on_parameters = _hook_parameters(model, target, clip_parameter, "clip_gradients")
    try:
        on_modules = attach(model, target, clip_inputs, on=Kind.BACKWARD, name="clip_gradients")
    except BaseException:
        on_parameters.remove()
        raise
    return HandleSet([on_parameters, on_modules])


def freeze(model: nn.Module, target: Target = None) -> HookHandle:
    """Keep the parameters of the named modules as they are, without touching gradients anywhere else.

    Recipe::

        with hookline.freeze(model, "backbone"):
            train(model)

    Their ``.grad`` is dropped now, and whenever a backward has filled it, and does not come back; so no optimizer
    moves them, by momentum or weight decay neither. What flows through the modules to those below is unchanged. A
    weight that another module shares is frozen there too; buffers, such as BatchNorm's statistics, still move.
    """
    handle = _hook_parameters(model, target, _drop_gradient, "freeze")
    for _, module in select(model, target):
        for parameter in module.parameters():
            _drop_gradient(parameter)
    return handle


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _hook_parameters(model: nn.Module, target: Target, hook: Hook, name: str) -> HookHandle:
    """Hook the trained parameters of the named modules, each once; a module without any is no error here."""
    modules = {name for name, _ in select(model, target)}
    chosen: dict[int, NamedParameter] = {}
    for each in named_parameters(model):
        if each.parameter.requires_grad and is_below(each.name, modules):
            chosen.setdefault(id(each.parameter), each)
    attachment = new_attachment(hook, Kind.PARAM_GRAD, AttachOptions(name=name))
    return attach_to_parameters(attachment, model, list(chosen.values()))


def _shrink(bound: float) -> Callable[[Tensor], Tensor]:
    """Return a function that scales a gradient down to the 2-norm ``bound`` if it is above."""

    def shrink(grad: Tensor) -> Tensor:
        # In float32, as the norm of half-precision gradients may not fit into theirs; no host sync. A tensor
        # within the bound is multiplied by exactly 1. 1e-38 stands in for a norm of 0.
        norm = linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
        scale = (bound / norm.clamp_min(1e-38)).clamp_max(1.0)
        shrunk: Tensor = (grad.to(norm.dtype) * scale).to(grad.dtype)
        return shrunk

    return shrink
