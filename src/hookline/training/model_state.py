"""Save model, optimizer, scheduler, scaler and random streams, and load them again.

`CoreState` and `SavedState` call it; it checks that what was saved fits before anything is loaded.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookline.error_policy import warn_user
from hookline.errors import CheckpointError, ResumeError
from hookline.guard import rng
from hookline.guard.loaders import generators_on, num_shuffles, set_num_shuffles
from hookline.messages import type_name
from hookline.sites.optimizers.optimizer_wrappers import unwrap_optimizer
from hookline.sites.wrappers import inner_key
from hookline.training.experiment import has_state

__all__ = [
    "ModelState",
    "check_state",
    "generator_states",
    "load_state",
    "set_generators",
    "set_streams",
    "state_of",
    "streams",
    "unwrapped",
]

_AROUND = ("OptimizedModule", "DistributedDataParallel", "DataParallel")
"""Wrappers that add nothing of their own; a run may be compiled before it is killed, and not when it goes on."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers that add nothing of their own."""
    while any(base.__name__ in _AROUND for base in type(model).__mro__) and (key := inner_key(model)) is not None:
        inner = model._modules[key]
        assert inner is not None
        model = inner
    return model


class ModelState:
    """Save and load a module."""

    def __init__(self, module: nn.Module, name: str = "model") -> None:
        self._module = unwrapped(module)
        self._name = name

    def save(self, *, gradients: bool = False) -> dict[str, Any]:
        """Return parameters, buffers (those that a state dict leaves out, too), modes and generators; copy nothing."""
        module = self._module
        tensors = dict(module.state_dict())
        parameters = dict(module.named_parameters())
        saved = {
            "tensors": tensors,
            "hidden": {name: buffer for name, buffer in module.named_buffers() if name not in tensors},
            "evaluating": [name for name, part in module.named_modules() if not part.training],
            "frozen": [name for name, parameter in parameters.items() if not parameter.requires_grad],
            "generators": generator_states(self._generators()),
        }
        if gradients:
            saved["gradients"] = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        return saved

    def check(self, saved: Mapping[str, Any], *, force: bool = False) -> None:
        """Refuse a saved state that does not fit; load nothing."""
        here, there = self._module.state_dict(), saved["tensors"]
        wrong = [f"{name} is missing here" for name in there if name not in here]
        wrong += [f"{name} was not saved" for name in here if name not in there]
        for name in here.keys() & there.keys():
            one, other = here[name], there[name]
            if not isinstance(one, Tensor) or not isinstance(other, Tensor):
                continue  # extra state of a module's own
            if one.shape != other.shape or (one.dtype != other.dtype and not force):
                wrong.append(f"{name} was {_shape(other)} and is {_shape(one)}")
        if wrong:
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise ResumeError(
                f"The {self._name} is another one than was saved: {'; '.join(sorted(wrong)[:5])}{more}. Nothing was "
                "loaded. Next: make it as it was, or begin a run in another folder."
            )

    def load(self, saved: Mapping[str, Any]) -> None:
        """Set the module to a saved state, each tensor in its place."""
        module = self._module
        module.load_state_dict(saved["tensors"])
        for name, buffer in saved["hidden"].items():
            self._load_hidden(name, buffer)
        evaluating, frozen = set(saved["evaluating"]), set(saved["frozen"])
        for name, part in module.named_modules():
            part.training = name not in evaluating
        for name, parameter in module.named_parameters():
            if parameter.requires_grad is (name in frozen):
                parameter.requires_grad_(name not in frozen)
            if "gradients" in saved:
                gradient = saved["gradients"].get(name)
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
        set_generators(self._generators(), saved["generators"], f"the {self._name}")

    def _generators(self) -> list[Any]:
        return [generator for part in self._module.modules() for generator in generators_on(part)]

    def _load_hidden(self, name: str, buffer: Tensor) -> None:
        """Load a buffer that is in no state dict; it may have grown on the way, as tables of positions do."""
        path, _, key = name.rpartition(".")
        try:
            owner = self._module.get_submodule(path)
        except AttributeError:
            return  # of a part that is made on the way
        live = owner._buffers.get(key)
        if live is None or live.shape != buffer.shape or live.dtype != buffer.dtype:
            first = next(iter(self._module.parameters()), buffer)
            owner._buffers[key] = buffer.to(first.device if live is None else live.device)
        else:
            with torch.no_grad():
                live.copy_(buffer)


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


# -- random streams, among them two of hooks: the stream that NumPy uses while hooks fire, and the count of shuffles
# that interventions have made


def streams(model: nn.Module) -> dict[str, Any]:
    """Return the states of the random streams of the process; about 150 µs."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": rng.cuda_states(),
        "numpy": rng.numpy_state(),
        "python": random.getstate(),
        "hooks": rng.hook_stream(),
        "shuffles": num_shuffles(model),
    }


def set_streams(states: Mapping[str, Any], model: nn.Module) -> None:
    """Set the random streams of the process."""
    torch.set_rng_state(states["torch"].cpu())
    rng.set_numpy_state(states["numpy"])
    random.setstate(states["python"])
    rng.set_hook_stream(states["hooks"])
    set_num_shuffles(model, states["shuffles"])
    if states["cuda"] is None:
        return
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
        rng.set_cuda_states([state.cpu() for state in states["cuda"]])
    else:
        warn_user("The run was on a GPU and goes on without one: what is drawn from now on is other than it would be.")


def generator_states(generators: Sequence[Any]) -> list[Any]:
    """Return the states of these generators."""
    return [rng.state_of(generator) for generator in generators]


def set_generators(generators: Sequence[Any], states: Sequence[Any], whose: str) -> None:
    """Set the states of these generators."""
    if len(generators) != len(states):
        raise ResumeError(f"There are {len(generators)} generators of {whose}, and {len(states)} were saved.")
    for generator, state in zip(generators, states, strict=True):
        try:
            rng.set_state(generator, state.cpu() if isinstance(state, torch.Tensor) else state)
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise ResumeError(f"A generator of {whose} is of another kind than was saved ({error}).") from error


# -- optimizers, schedulers, scalers -----------------------------------------------------------------------------


def state_of(thing: Any, name: str) -> Any:
    """Return the state of an optimizer, scheduler or scaler; None of None."""
    if thing is None:
        return None
    if not has_state(thing):
        raise CheckpointError(f"The {name}, {type_name(thing)}, has no state_dict() and load_state_dict().")
    saved = {"kind": type(thing).__name__, "state": thing.state_dict()}
    optimizer = unwrap_optimizer(thing)
    if isinstance(optimizer, torch.optim.Optimizer):
        # Whether it has made a step: a scheduler that comes first in a resumed run would be warned of otherwise.
        saved["stepped"] = getattr(optimizer, "_opt_called", False)
    return saved


def check_state(thing: Any, saved: Any, name: str, *, force: bool = False) -> None:
    """Refuse the state of another optimizer, scheduler or scaler; load nothing."""
    if (thing is None) is not (saved is None):
        found = "has none" if saved is None else "has one"
        raise ResumeError(f"The checkpoint {found} for {name}, and here it is {type_name(thing)}.")
    if thing is None:
        return
    kinds = [saved["kind"], type(thing).__name__]
    groups = [_group_sizes(saved["state"].get("param_groups", ())), _group_sizes(getattr(thing, "param_groups", ()))]
    if (kinds[0] != kinds[1] and not force) or groups[0] != groups[1]:
        was, here = (f"{kind} with groups of {sizes} parameters" for kind, sizes in zip(kinds, groups, strict=True))
        raise ResumeError(
            f"The {name} is another one than was saved: it was {was} and is {here}. Nothing was loaded. Next: make it "
            "as it was, with the groups that were added on the way, or begin a run in another folder."
        )


def _group_sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def load_state(thing: Any, saved: Any) -> None:
    """Load a state; where it is wider than its parameter it stays so, while torch would narrow it."""
    if thing is None:
        return
    thing.load_state_dict(saved["state"])
    optimizer = unwrap_optimizer(thing)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    optimizer._opt_called = saved["stepped"]  # type: ignore[attr-defined]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, state in saved["state"].get("state", {}).items():
        live = optimizer.state[parameters[index]] if isinstance(index, int) else {}
        for key, value in state.items():
            if isinstance(value, Tensor) and key in live and live[key].dtype != value.dtype:
                live[key] = value.to(live[key].device)
