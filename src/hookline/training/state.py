"""Save, check and load what decides how training goes on, and hand an experiment's own part of it to the guard.

`Saving` has a `RunState` for model, optimizer, scheduler, scaler, random streams and what ``Experiment.state`` declares
besides, and gives a `Run` `SavedPasses`, which save how far a pass over the data has come and get there again: by the
loader's own ``state_dict()``, or by iterating it again from the streams that the pass began with and skipping what was
used. A `Run` gives its guards a `GuardedState`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset, Sampler

from hookline.error_policy import warn_user
from hookline.errors import CheckpointError, OptionError, ResumeError
from hookline.guard import rng
from hookline.guard.loaders import (
    datasets_of,
    generators_of_loader,
    generators_on,
    num_shuffles,
    samplers_of,
    set_num_shuffles,
)
from hookline.guard.rng import GENERATOR_TYPES, RandomStates
from hookline.lifecycle.checkpoint_file import is_sharded
from hookline.messages import type_name
from hookline.sites.wrappers import inner_key
from hookline.training.experiment import Experiment, grouped, has_state, is_named_tuple, is_record, items_of
from hookline.tree import rebuilt

_PARTS: Final = ("optimizer", "scheduler", "scaler")
_AROUND: Final = ("OptimizedModule", "DistributedDataParallel", "DataParallel")
"""Wrappers that add nothing of their own; a run may be compiled before it is killed, and not when it goes on."""
_WITH_GRADIENTS: Final = (nn.Module, nn.Parameter, Optimizer)
_ENTERED: Final = (nn.Module, Optimizer, LRScheduler, Sampler, torch.amp.GradScaler, *GENERATOR_TYPES)
"""Objects with a state whose attributes the guard looks through."""


class RunState:
    """Save and load what decides how training goes on, hooks and data apart."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        for name, value in experiment.state.items():
            if not self._is_settable(name) and not _can_be_filled(value):
                raise CheckpointError(
                    f"experiment.state[{name!r}] is {type_name(value)}, and no attribute that a resumed run could set. "
                    "Next: make it an attribute of that name, or declare the object that has it, as in "
                    "vars(self.queue)."
                )

    def _is_settable(self, name: str) -> bool:
        """Return whether the experiment has an attribute of that name; a property needs a setter."""
        of_class = getattr(type(self._experiment), name, None)
        return hasattr(self._experiment, name) and not (isinstance(of_class, property) and of_class.fset is None)

    def generators(self) -> list[Any]:
        """Return the declared generators, in an order that is the same in every process."""
        nodes = (thing for name, value in self._experiment.state.items() for _, thing in _walk(value, name))
        return [thing for thing in nodes if isinstance(thing, GENERATOR_TYPES)]

    # -- saving ------------------------------------------------------------------------------------------------

    def save(self, *, gradients: bool) -> dict[str, Any]:
        """Return the state, without copying; with ``gradients``, which hooks may look at."""
        experiment = self._experiment
        # The usual step sets gradients to zero first; a step of one's own may look at those of before.
        gradients = gradients or experiment.has_own("train_step")
        elsewhere = {id(getattr(experiment, name)) for name in _PARTS} | set(map(id, experiment.model.modules()))
        return {
            "model": save_object(experiment.model, gradients=gradients),
            **{name: self._save_part(name) for name in _PARTS},
            "own": {name: _saved(value, elsewhere) for name, value in experiment.state.items()},
            "streams": streams(experiment.model),
        }

    def _save_part(self, name: str) -> dict[str, Any] | None:
        part = getattr(self._experiment, name)
        if part is not None and not has_state(part):
            raise CheckpointError(f"The {name}, {type_name(part)}, has no state_dict() and load_state_dict().")
        return None if part is None else save_object(part)

    # -- loading -----------------------------------------------------------------------------------------------

    def check(self, saved: Mapping[str, Any], *, force: bool) -> None:
        """Refuse a saved state that does not fit; load nothing."""
        experiment = self._experiment
        for name in ("model", *_PARTS):
            check_object(getattr(experiment, name), saved[name], name, force=force)
        for name, state in saved["own"].items():
            _fit(experiment.state.get(name), state, f"experiment.{name}", force=force)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Set everything to a saved state, each tensor in its place."""
        experiment = self._experiment
        for name in ("model", *_PARTS):
            if saved[name] is not None:
                load_object(getattr(experiment, name), saved[name], name)
        self.load_own(saved["own"])
        set_streams(saved["streams"], experiment.model)

    def load_own(self, saved: Mapping[str, Any]) -> None:
        """Set what the experiment declares to a saved state, in place where others may refer to what it has."""
        live = self._experiment.state
        for name, state in saved.items():
            value = _fit(live.get(name), state, f"experiment.{name}", force=True)()
            if name not in live or (value is not live[name] and self._is_settable(name)):
                setattr(self._experiment, name, value)


# -- modules, generators, and whatever else tells its state ----------------------------------------------------------


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers that add nothing of their own."""
    while any(base.__name__ in _AROUND for base in type(model).__mro__) and (key := inner_key(model)) is not None:
        inner = model._modules[key]
        assert inner is not None
        model = inner
    return model


def save_object(thing: Any, *, gradients: bool = True) -> dict[str, Any]:
    """Return the state of an object that has one, without copying."""
    if isinstance(thing, nn.Module):
        return _save_module(unwrapped(thing), gradients=gradients)
    if isinstance(thing, GENERATOR_TYPES):
        return {"generator": rng.state_of(thing)}
    saved = {"kind": type(thing).__name__, "state": thing.state_dict()}
    if isinstance(thing, Optimizer):
        # Whether it has made a step: a scheduler that comes first in a resumed run would be warned of otherwise.
        saved["stepped"] = getattr(thing, "_opt_called", False)
    return saved


def check_object(thing: Any, saved: Mapping[str, Any] | None, name: str, *, force: bool) -> None:
    """Refuse the state of another object, or of none; load nothing."""
    form = "tensors" if isinstance(thing, nn.Module) else "generator" if isinstance(thing, GENERATOR_TYPES) else "state"
    if thing is None or saved is None or form not in saved:
        if thing is saved:
            return
        found = "has none" if saved is None else "has one"
        raise ResumeError(f"The checkpoint {found} for {name}, and here it is {type_name(thing)}. Nothing was loaded.")
    if form == "tensors":
        wrong = _wrong_tensors(unwrapped(thing).state_dict(), saved["tensors"], force=force)
    else:
        wrong = _wrong_kind(thing, saved, force=force) if form == "state" else []
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ResumeError(
            f"The {name} is another one than was saved: {'; '.join(sorted(wrong)[:5])}{more}. Nothing was loaded. "
            "Next: make it as it was, with the groups that were added on the way, or begin a run in another folder."
        )


def load_object(thing: Any, saved: Mapping[str, Any], name: str) -> Any:
    """Set an object to a saved state, each tensor in its place; return the object."""
    if "tensors" in saved:
        _load_module(unwrapped(thing), saved, name)
    elif "generator" in saved:
        set_generators([thing], [saved["generator"]], name)
    else:
        thing.load_state_dict(saved["state"])
        if isinstance(thing, Optimizer):
            thing._opt_called = saved["stepped"]  # type: ignore[attr-defined]
            _widen(thing, saved["state"].get("state", {}))
    return thing


def _save_module(module: nn.Module, *, gradients: bool) -> dict[str, Any]:
    """Return parameters, buffers (those that a state dict leaves out, too), modes and generators."""
    tensors, parameters = dict(module.state_dict()), dict(module.named_parameters())
    saved = {
        "tensors": tensors,
        "hidden": {name: buffer for name, buffer in module.named_buffers() if name not in tensors},
        "evaluating": [name for name, part in module.named_modules() if not part.training],
        "frozen": [name for name, parameter in parameters.items() if not parameter.requires_grad],
        "generators": generator_states(_generators_of(module)),
    }
    if gradients:
        saved["gradients"] = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return saved


def _generators_of(module: nn.Module) -> list[Any]:
    return [generator for part in module.modules() for generator in generators_on(part)]


def _load_module(module: nn.Module, saved: Mapping[str, Any], name: str) -> None:
    module.load_state_dict(saved["tensors"])
    for path, buffer in saved["hidden"].items():
        _load_hidden(module, path, buffer)
    evaluating, frozen = set(saved["evaluating"]), set(saved["frozen"])
    for path, part in module.named_modules():
        part.training = path not in evaluating
    for path, parameter in module.named_parameters():
        if parameter.requires_grad is (path in frozen):
            parameter.requires_grad_(path not in frozen)
        if "gradients" in saved:
            gradient = saved["gradients"].get(path)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
    set_generators(_generators_of(module), saved["generators"], f"the {name}")


def _load_hidden(module: nn.Module, path: str, buffer: Tensor) -> None:
    """Load a buffer that is in no state dict; it may have grown on the way, as tables of positions do."""
    parent, _, key = path.rpartition(".")
    try:
        owner = module.get_submodule(parent)
    except AttributeError:
        return  # of a part that is made on the way
    live = owner._buffers.get(key)
    if live is None or live.shape != buffer.shape or live.dtype != buffer.dtype:
        first = next(iter(module.parameters()), buffer)
        owner._buffers[key] = buffer.to(first.device if live is None else live.device)
    else:
        with torch.no_grad():
            live.copy_(buffer)


def _wrong_tensors(here: Mapping[str, Any], there: Mapping[str, Any], *, force: bool) -> list[str]:
    """Return how the tensors of a module differ from those that were saved."""
    pairs = {name: (_shape(there.get(name), force), _shape(here.get(name), force)) for name in {**there, **here}}
    return [f"{name} was {was} and is {now}" for name, (was, now) in pairs.items() if was != now]


def _shape(value: Any, force: bool) -> str:
    if not isinstance(value, Tensor):
        return "missing" if value is None else "extra state of a module"
    dtype = "" if force else f"{str(value.dtype).removeprefix('torch.')} "
    return f"{dtype}{tuple(value.shape)}{' in shards' if is_sharded(value) else ''}"


def _wrong_kind(thing: Any, saved: Mapping[str, Any], *, force: bool) -> list[str]:
    """Return how the kind of an object, or its groups of parameters, differ from those that were saved."""
    kinds = saved["kind"], type(thing).__name__
    groups = saved["state"].get("param_groups", ()), getattr(thing, "param_groups", ())
    sizes = [[len(group["params"]) for group in each] for each in groups]
    if sizes[0] == sizes[1] and (kinds[0] == kinds[1] or force):
        return []
    was, here = (f"{kind} with groups of {size} parameters" for kind, size in zip(kinds, sizes, strict=True))
    return [f"it was {was} and is {here}"]


def _widen(optimizer: Optimizer, states: Mapping[Any, Any]) -> None:
    """Let states that are wider than their parameter stay so, while torch has narrowed them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, state in states.items():
        live = optimizer.state[parameters[index]] if isinstance(index, int) else {}
        for key, value in state.items():
            if isinstance(value, Tensor) and key in live and live[key].dtype != value.dtype:
                live[key] = value.to(live[key].device)


# -- random streams, among them two things of hooks: the marks of their own stream, and the count of shuffles that
# interventions have made


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
        warn_user(
            "The run was on a GPU and continues without one: what is drawn from now on is other than it would be."
        )


def generator_states(generators: Iterable[Any]) -> list[Any]:
    """Return the states of these generators."""
    return [rng.state_of(generator) for generator in generators]


def set_generators(generators: Sequence[Any], states: Sequence[Any], whose: str) -> None:
    """Set the states of these generators."""
    if len(generators) != len(states):
        raise ResumeError(f"There are {len(generators)} generators of {whose}, and {len(states)} were saved.")
    for generator, state in zip(generators, states, strict=True):
        try:
            rng.set_state(generator, state.cpu() if isinstance(state, Tensor) else state)
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise ResumeError(f"A generator of {whose} is of another kind than was saved ({error}).") from error


# -- what an experiment declares: containers, with a dictionary in place of each object -----------------------------

_STATE: Final = "hookline.state"
"""The key of an object's state; None if it is saved elsewhere."""
_ATTRIBUTES: Final = "hookline.attributes"
"""The key of the attributes of a dataclass, or of the fields of a named tuple."""
_MEMBER: Final = "hookline.member"
"""The key of the name of a member of an enum."""


def _form(value: Any) -> str | None:
    """Return the key of the dictionary that is saved in place of an object; None of a plain value or container."""
    if has_state(value):
        return _STATE
    if is_record(value) or is_named_tuple(value):
        return _ATTRIBUTES
    is_member = isinstance(value, Enum) and value.name in type(value).__members__  # flags together are none
    return _MEMBER if is_member else None


def _walk(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield a value and all that is in it, each with its place: ``optimizers[0]``."""
    yield place, value
    for key, item in items_of(value) or ():
        if type(item) not in (int, float, str):  # a long list of numbers is passed over quickly
            yield from _walk(item, f"{place}[{key!r}]")


def _saved(value: Any, elsewhere: set[int]) -> Any:
    """Return a value with a dictionary in place of each object; of one that is saved ``elsewhere``, an empty one."""
    form = _form(value)
    if form == _STATE:
        return {_STATE: None if id(value) in elsewhere else save_object(value)}
    if form == _MEMBER:
        return {_MEMBER: value.name}
    parts = items_of(value)
    if parts is None:
        return value
    items = {key: _saved(item, elsewhere) for key, item in parts}
    return {_ATTRIBUTES: items} if form == _ATTRIBUTES else rebuilt(value, items)


def _fit(live: Any, saved: Any, name: str, *, force: bool) -> Callable[[], Any]:
    """Return a function that loads what was saved and returns what is to be in place of ``live``: itself, where that
    can be. Refuse what does not fit, before anything is loaded.
    """
    form = next((key for key in (_STATE, _ATTRIBUTES, _MEMBER) if isinstance(saved, dict) and key in saved), None)
    if form is not None and (form != _form(live) or (form == _MEMBER and saved[form] not in type(live).__members__)):
        raise ResumeError(
            f"The state of {name} was saved, and here it is {type_name(live)}. Nothing was loaded. Next: make it "
            "before the loop begins, in __init__ for example."
        )
    if form == _MEMBER:
        return lambda: type(live)[saved[form]]
    if form == _STATE:
        if saved[form] is None:
            return lambda: live
        check_object(live, saved[form], name, force=force)
        return lambda: load_object(live, saved[form], name)
    there = dict(items_of(live) or ())
    parts = items_of(saved if form is None else saved[form])
    inside = {key: _fit(there.get(key), item, f"{name}[{key!r}]", force=force) for key, item in parts or ()}

    def load() -> Any:
        items = {key: part() for key, part in inside.items()}
        if form is None:
            return _filled(live, saved if parts is None else rebuilt(saved, items))
        if is_named_tuple(live):
            return live._replace(**{key: value for key, value in items.items() if key in there})
        vars(live).update(items)
        return live

    return load


def _can_be_filled(value: Any) -> bool:
    """Return whether a value can be loaded in place, also if it is no attribute."""
    if isinstance(value, tuple):
        return all(map(_can_be_filled, value))
    return has_state(value) or is_record(value) or isinstance(value, Tensor | np.ndarray | dict | list | set | deque)


def _filled(live: Any, saved: Any) -> Any:
    """Put what was saved into the live tensor, array or container, if it is alike; return the one that has it.

    Devices and paths stay the program's: a run may go on on another device, in another folder.
    """
    if isinstance(live, torch.device | Path):
        return live
    if isinstance(live, Tensor) and isinstance(saved, Tensor):
        if (live.shape, live.dtype) != (saved.shape, saved.dtype) or live.is_inference() or 0 in live.stride():
            return saved
        with torch.no_grad():
            return live.copy_(saved)
    if isinstance(live, np.ndarray):
        if not isinstance(saved, np.ndarray) or live.shape != saved.shape or not live.flags.writeable:
            return saved
        live[...] = saved
    elif isinstance(live, dict) and isinstance(saved, dict):
        live.clear()
        live.update(saved)
    elif type(live) is type(saved) and isinstance(live, list | set | deque):
        live.clear()
        (live.update if isinstance(live, set) else live.extend)(saved)
    else:
        return saved
    return live


# -- for the guard ---------------------------------------------------------------------------------------------------


class GuardedState:
    """Join the declared state of an experiment with the optimizer, the scheduler or the scaler, for a guard."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._joints = {name: SimpleNamespace() for name in _PARTS}
        """What the guard looks through; the same objects each time, since it keeps its memory by them."""

    def parts(self, loader: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Return what a guard has to save: model, optimizer, scheduler, scaler, loader, with all that is declared."""
        experiment, others = self._experiment, self._found()
        trained = {name: others.pop(name) for name in list(others) if _has_gradients(others[name], name)}
        optimizer, scaler = self._joined("optimizer", trained), self._joined("scaler", others)
        return experiment.model, optimizer, experiment.scheduler, scaler, loader

    @property
    def all_but_optimizer(self) -> Any:
        """The scheduler and all that is declared, where optimizer and scaler have to be handed over as they are."""
        return self._joined("scheduler", self._found())

    def _found(self) -> dict[str, Any]:
        """Return what is declared, and the attributes of objects that the guard does not enter by itself."""
        found = dict(self._experiment.state)
        for name, value in list(found.items()):
            for place, thing in _walk(value, name):
                if is_record(thing) or (has_state(thing) and not isinstance(thing, _ENTERED)):
                    found[place] = getattr(thing, "__dict__", None)
        return found

    def _joined(self, part: str, others: Mapping[str, Any]) -> Any:
        itself, joint = getattr(self._experiment, part), self._joints[part]
        if not others:
            return itself
        vars(joint).clear()
        vars(joint).update({**others, "itself": itself})
        return joint

    def save_attributes(self) -> Callable[[], None]:
        """Save which objects the attributes of the experiment are; return a function that puts them back."""
        attributes = vars(self._experiment)
        before = dict(attributes)

        def put_back() -> None:
            attributes.clear()
            attributes.update(before)

        return put_back


def _has_gradients(value: Any, name: str) -> bool:
    return any(isinstance(thing, _WITH_GRADIENTS) for _, thing in _walk(value, name))


# -- the data: one pass after the other, and how far a pass has come -----------------------------------------------

_SCALARS: Final = (bool, int, float, str, type(None))


class Passes:
    """Give out the data of an experiment, one pass after the other."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.loader: Any = experiment.loader
        """Of this pass."""

    @property
    def has_no_data(self) -> bool:
        """True if the steps need no batches."""
        return self.experiment.loader is None and not self.experiment.has_own("get_loader")

    def take_loader(self, epoch: int) -> None:
        """Ask for the loader of another pass."""
        self.loader = self.experiment.get_loader(epoch)
        if self.loader is None:
            raise OptionError(f"The experiment has no loader to take the batches of epoch {epoch} from: give it one.")
        for sampler in samplers_of(self.loader).values():
            if hasattr(sampler, "set_epoch"):  # a DistributedSampler gives out the same order until it is told
                sampler.set_epoch(epoch)

    def batches(self) -> Iterator[Any]:
        """Return the batches of the steps of this pass."""
        return iter(self.grouped(self.loader))

    def grouped(self, loader: Any) -> Any:
        """Return a loader that gives out as many batches at a time as make a step."""
        number = self.experiment.accumulate
        return loader if number == 1 else grouped(loader, number)


class SavedPasses(Passes):
    """Give out the data, and save and restore the position in them."""

    def __init__(self, experiment: Experiment, state: RunState) -> None:
        super().__init__(experiment)
        self._state = state
        self._before: dict[str, Any] = {}
        self._start: dict[str, Any] = {}

    @property
    def can_go_on(self) -> bool:
        """True if a run can be saved in the middle of a pass over these data."""
        loader = self.loader
        if loader is None or has_state(loader):
            return True
        if isinstance(loader, DataLoader):
            return not isinstance(loader.dataset, IterableDataset)
        return hasattr(loader, "__getitem__") and hasattr(loader, "__len__")

    # -- a pass begins -----------------------------------------------------------------------------------------

    def take_loader(self, epoch: int) -> None:
        """Ask for the loader of another pass; save the streams before, since the experiment may draw to make it."""
        self._before = {
            "streams": streams(self.experiment.model),
            "own": generator_states(self._state.generators()),
            "fixed": generator_states(generators_of_loader(self.experiment.loader)),
        }
        super().take_loader(epoch)

    def batches(self) -> Iterator[Any]:
        """Return the batches of this pass; save the state of the loader before it is iterated."""
        self._warm_up_if(self._start.pop("to warm up", False))
        self._start = {**_parts(self.loader), "warm": _is_warm(self.loader)}
        return super().batches()

    def _warm_up_if(self, wanted: bool) -> None:
        """Start workers that persist, which are there from the second pass on; starting them draws a number."""
        loader = self.loader
        if wanted and getattr(loader, "persistent_workers", False) and not _is_warm(loader):
            before = RandomStates(generators_of_loader(loader))
            iter(loader)
            before.restore()

    # -- saving ------------------------------------------------------------------------------------------------

    def save(self, *, within: bool, begun: bool) -> dict[str, Any]:
        """Return the position: ``within`` a pass, or between two; and whether any has ``begun``."""
        fixed: Any = self.experiment.loader
        saved: dict[str, Any] = {"fixed": {**_parts(fixed), "warm": _is_warm(fixed)}}
        loader = self.loader if within else fixed
        if begun and has_state(loader):
            saved["state"] = loader.state_dict()
        if within:
            saved |= {"before": self._before, "start": self._start, "now": _parts(self.loader)}
        return saved

    # -- going on ----------------------------------------------------------------------------------------------

    def load(self, saved: Mapping[str, Any], *, within: bool) -> None:
        """Go on between two passes; or ``within`` one, for which `go_on` is called later."""
        loader: Any = self.experiment.loader
        _set_parts(loader, saved["fixed"])
        if within:
            return
        self._start = {"to warm up": saved["fixed"]["warm"]}
        if "state" in saved and has_state(loader):
            loader.load_state_dict(saved["state"])

    def go_on(self, saved: Mapping[str, Any], epoch: int, done: int) -> Iterator[Any]:
        """Return the rest of a pass of which `done` steps were made; the streams are then anywhere."""
        self._before, self._start = dict(saved["before"]), dict(saved["start"])
        set_generators(self._state.generators(), self._before["own"], "the experiment")
        set_generators(generators_of_loader(self.experiment.loader), self._before["fixed"], "the loader")
        set_streams(self._before["streams"], self.experiment.model)
        super().take_loader(epoch)
        loader = self.loader
        if "state" in saved and has_state(loader):
            loader.load_state_dict(saved["state"])
            rest, done = iter(loader), 0
        else:
            _set_parts(loader, self._start)
            self._warm_up_if(self._start["warm"])
            rest = iter(loader)
        batches: Iterator[Any] = iter(self.grouped(rest))
        for number in range(done):
            if next(batches, _END) is _END:
                raise ResumeError(
                    f"The run was saved after {done} steps of pass {epoch} over the data, and now there are data for "
                    f"{number}. The data have changed."
                )
        return batches

    def set_now(self, saved: Mapping[str, Any]) -> None:
        """Set the loader's generators to where they stood after the steps that were made."""
        _set_parts(self.loader, saved["now"])


_END: Final = object()


def _is_warm(loader: Any) -> bool:
    return getattr(loader, "_iterator", None) is not None


def _counting(loader: Any) -> list[Any]:
    """Return the user's own samplers, datasets and loader; torch's keep nothing between passes but generators.

    In workers there are copies of the dataset, which are made anew.
    """
    itself = [] if isinstance(loader, DataLoader) or has_state(loader) else [loader]
    data = datasets_of(loader.dataset) if isinstance(loader, DataLoader) else []
    found = [part for part in (*itself, *samplers_of(loader).values(), *data) if hasattr(part, "__dict__")]
    return [part for part in found if not type(part).__module__.startswith("torch.")]


def _parts(loader: Any) -> dict[str, Any]:
    """Return the states of generators, and the numbers that samplers and datasets keep (an epoch that they count
    themselves).
    """
    counts = [part.state_dict() if has_state(part) else _scalars_of(part) for part in _counting(loader)]
    return {"generators": generator_states(generators_of_loader(loader)), "counts": counts}


def _scalars_of(part: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if type(value) in _SCALARS}


def _set_parts(loader: Any, parts: Mapping[str, Any]) -> None:
    set_generators(generators_of_loader(loader), parts["generators"], "the loader")
    counting, counts = _counting(loader), parts["counts"]
    if len(counting) != len(counts):
        raise ResumeError(f"The loader has {len(counting)} samplers and datasets of your own, and had {len(counts)}.")
    for part, state in zip(counting, counts, strict=True):
        if has_state(part):
            part.load_state_dict(state)
        else:
            vars(part).update(state)
