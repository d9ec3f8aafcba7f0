"""Save model, optimizer, scheduler, scaler and random streams, and load them again.

`CoreState` and `SavedState` call it; it checks that what was saved fits before anything is loaded.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookline.errors import CheckpointError, HooklineWarning, ResumeError
from hookline.guard import rng
from hookline.guard.loaders import generators_on, num_shuffles, set_num_shuffles
from hookline.messages import caller_stacklevel, type_name
from hookline.sites.optimizers.optimizer_wrappers import unwrap_optimizer
from hookline.sites.wrappers import inner_key
from hookline.training.experiment import has_state

__all__ = [
    "ModelState",
    "check_state",
    "generator_states",
    "load_state",
    "scalars_of",
    "set_generators",
    "set_streams",
    "state_of",
    "streams",
    "unwrapped",
]

_AROUND = ("OptimizedModule", "DistributedDataParallel", "DataParallel")
"""Wrappers that add nothing of their own; a run may be compiled before it is killed, and not when it goes on."""

_SCALARS = (bool, int, float, str, type(None))
_OF_TORCH = frozenset(vars(nn.Module()))
"""What every module has."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers that add nothing of their own."""
    while _is_around(model) and (key := inner_key(model)) is not None:
        inner = model._modules[key]
        assert inner is not None
        model = inner
    return model


def _is_around(model: nn.Module) -> bool:
    return any(base.__name__ in _AROUND for base in type(model).__mro__)


class ModelState:
    """Save and load a module."""

    def __init__(self, module: nn.Module, name: str = "model") -> None:
        self._module = unwrapped(module)
        self._name = name

    def save(self, *, gradients: bool = False, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return parameters, buffers (those that a state dict leaves out, too), modes and generators, without copying.

        Of the numbers that modules keep as attributes, those that are not what `scalars_of` gave ``before``.
        """
        module = self._module
        tensors = dict(module.state_dict())
        hidden = {name: buffer for name, buffer in module.named_buffers() if name not in tensors}
        parameters = dict(module.named_parameters())
        saved = {
            "tensors": tensors,
            "hidden": hidden,
            "evaluating": [name for name, part in module.named_modules() if not part.training],
            "frozen": [name for name, parameter in parameters.items() if not parameter.requires_grad],
            "generators": generator_states(self._generators()),
            "scalars": {} if before is None else _changed(before, scalars_of(module)),
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
            if isinstance(one, Tensor) and isinstance(other, Tensor) and _differ(one, other, force=force):
                wrong.append(f"{name} was {_shape(other)} and is {_shape(one)}")
        if wrong:
            raise ResumeError(
                f"The {self._name} is another one than was saved: {_listed(sorted(wrong))}. Nothing was loaded. Next: "
                "make it as it was, or begin a run in another folder."
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
        parts = dict(module.named_modules())
        for place, value in saved["scalars"].items():
            path, _, key = place.rpartition(".")
            if path in parts:
                parts[path].__dict__[key] = value

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


def scalars_of(module: nn.Module) -> dict[str, Any]:
    """Return numbers and texts that modules keep as attributes, by place: a counter of calls is in no state dict."""
    return {
        f"{path}.{name}": value
        for path, part in unwrapped(module).named_modules()
        for name, value in vars(part).items()
        if type(value) in _SCALARS and name not in _OF_TORCH
    }


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    return {place: value for place, value in now.items() if place not in before or before[place] != value}


def _differ(one: Tensor, other: Tensor, *, force: bool) -> bool:
    return one.shape != other.shape or (one.dtype != other.dtype and not force)


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _listed(items: list[str], most: int = 5) -> str:
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")


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
    if states["cuda"] is not None:
        _set_cuda(states["cuda"])
    rng.set_numpy_state(states["numpy"])
    random.setstate(states["python"])
    rng.set_hook_stream(states["hooks"])
    set_num_shuffles(model, states["shuffles"])


def _set_cuda(states: Sequence[torch.Tensor]) -> None:
    if not torch.cuda.is_available():
        warnings.warn(
            "The run was on a GPU and goes on without one: what is drawn from now on is other than it would be.",
            HooklineWarning,
            stacklevel=caller_stacklevel(),
        )
        return
    torch.cuda.init()  # type: ignore[no-untyped-call]
    rng.set_cuda_states([state.cpu() for state in states])


def generator_states(generators: Sequence[Any]) -> list[Any]:
    """Return the states of these generators."""
    return [rng.state_of(generator) for generator in generators]


def set_generators(generators: Sequence[Any], states: Sequence[Any], whose: str) -> None:
    """Set the states of these generators."""
    if len(generators) != len(states):
        raise ResumeError(
            f"The checkpoint has the states of {len(states)} generators of {whose}, and there are {len(generators)} "
            "here. Make the run as it was made when it was saved."
        )
    for generator, state in zip(generators, states, strict=True):
        try:
            rng.set_state(generator, state.cpu() if isinstance(state, torch.Tensor) else state)
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise ResumeError(
                f"A generator of {whose} is of another kind than when the run was saved ({error})."
            ) from error


# -- optimizers, schedulers, scalers -----------------------------------------------------------------------------


def state_of(thing: Any, name: str) -> Any:
    """Return the state of an optimizer, scheduler or scaler; None of None."""
    if thing is None:
        return None
    if not has_state(thing):
        raise CheckpointError(
            f"A checkpoint holds the state of {name}, and {type_name(thing)} has no state_dict() and load_state_dict()."
            " Give it both, or leave checkpoints= out."
        )
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
    kind, was = type(thing).__name__, saved["kind"]
    if kind != was and not force:
        raise ResumeError(
            f"The {name} is another one than was saved: it was {was} and is {kind}. Nothing was loaded. "
            "Next: make it as it was, or begin a run in another folder."
        )
    optimizer = unwrap_optimizer(thing)
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_groups(optimizer, saved["state"], name)


def _check_groups(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], name: str) -> None:
    groups, saved = optimizer.param_groups, state.get("param_groups", ())
    here, there = ([len(group["params"]) for group in some] for some in (groups, saved))
    if here != there:
        raise ResumeError(
            f"The {name} is another one than was saved: it has groups of {_counts(here)} parameters, and had groups of "
            f"{_counts(there)}. Nothing was loaded. Next: make it as it was; groups that were added on the way have to "
            "be there before the run goes on."
        )


def _counts(numbers: Iterable[int]) -> str:
    return " and ".join(map(str, numbers)) or "no"


def load_state(thing: Any, saved: Any) -> None:
    """Load a state; where it is wider than its parameter it stays so, while torch would narrow it."""
    if thing is None:
        return
    thing.load_state_dict(saved["state"])
    optimizer = unwrap_optimizer(thing)
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer._opt_called = saved["stepped"]  # type: ignore[attr-defined]
        _widen(optimizer, saved["state"])


def _widen(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, state in saved.get("state", {}).items():
        live = optimizer.state[parameters[index]] if isinstance(index, int) else {}
        for key, value in state.items():
            if isinstance(value, Tensor) and key in live and live[key].dtype != value.dtype:
                live[key] = value.to(live[key].device)
