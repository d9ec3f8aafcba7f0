"""Hand what an experiment declares as its state to the guard, and to checkpoints.

`Experiment.state` says what belongs to a run besides model, optimizer, scheduler, scaler and loader. `GuardedState`
gives it to the guards of a `Run`; `SavedState` saves and loads it, and `CoreState` all that decides how training goes
on, for `Saving`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

from hookline.checkpoint_file import digest
from hookline.error_policy import warn_user
from hookline.errors import CheckpointError, ResumeError
from hookline.guard.guard import rollback
from hookline.guard.rng import GENERATOR_TYPES
from hookline.lifecycle.states import copied
from hookline.messages import type_name
from hookline.training.experiment import Experiment, attributes_of, has_state, is_record
from hookline.training.model_state import (
    ModelState,
    check_state,
    generator_states,
    load_state,
    set_generators,
    set_streams,
    state_of,
    streams,
)

if TYPE_CHECKING:
    from hookline.guard.snapshot import PreEpochState

__all__ = ["CoreState", "GuardedState", "SavedState"]

_WITH_GRADIENTS: Final = (nn.Module, nn.Parameter, Optimizer)
_ENTERED: Final = (nn.Module, Optimizer, LRScheduler, Sampler, torch.amp.GradScaler, *GENERATOR_TYPES)
"""Objects with a state whose attributes the guard looks through."""
LARGE: Final = 256 * 2**20
"""Bytes of a declared tensor that is more likely data than state."""
_PARTS: Final = ("optimizer", "scheduler", "scaler")
_STATE: Final = "hookline.state"
_ATTRIBUTES: Final = "hookline.attributes"
_MEMBER: Final = "hookline.member"
"""Keys of a saved dictionary that stands for an object: its state, the attributes of a dataclass, the name of a member
of an enum."""


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return the items of a container, or of a dataclass, by key or number."""
    if is_record(value):
        value = vars(value)
    elif _is_named_tuple(value):
        value = value._asdict()
    if isinstance(value, dict):
        return iter(value.items())
    return enumerate(value) if isinstance(value, list | tuple | set | frozenset | deque) else iter(())


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _walk(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield a value and all that is in it, each with its place: ``optimizers[0]``."""
    yield place, value
    for key, item in _items(value):
        if type(item) not in (int, float, str):  # a long list of numbers is passed over quickly
            yield from _walk(item, f"{place}[{key!r}]")


# -- for the guard ---------------------------------------------------------------------------------------------------


class _Together:
    """Hold several objects as attributes of one, which the guard looks through."""


class GuardedState:
    """Join the declared state of an experiment with the optimizer, the scheduler or the scaler, for a guard."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._kept = {name: _Together() for name in _PARTS}
        """The same objects each time, since a guard keeps its memory by them."""
        self._has_warned = False

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

    def warn_of_large(self) -> None:
        """Warn once of each large tensor that is declared, since it will be copied or saved again and again."""
        for name, value in {} if self._has_warned else self._experiment.state.items():
            for place, thing in _walk(value, name):
                if isinstance(thing, Tensor) and thing.nbytes > LARGE:
                    warn_user(
                        f"experiment.{place} is a tensor of {thing.nbytes >> 20:,} MB, and so part of the experiment's "
                        "state: it is copied for each intervention and saved in each checkpoint. Next: if the run does "
                        "not change it, override the property `state` and leave it out, or keep it in a Dataset."
                    )
        self._has_warned = True

    def _found(self) -> dict[str, Any]:
        """Return what is declared, and the attributes of objects that the guard does not enter by itself."""
        found = dict(self._experiment.state)
        for name, value in list(found.items()):
            for place, thing in _walk(value, name):
                if is_record(thing) or (has_state(thing) and not isinstance(thing, _ENTERED)):
                    found[place] = getattr(thing, "__dict__", None)
        return found

    def _joined(self, part: str, others: Mapping[str, Any]) -> Any:
        itself = getattr(self._experiment, part)
        if not others:
            return itself
        held = vars(self._kept[part])
        held.clear()
        held.update({**others, "itself": itself})
        return self._kept[part]

    def save_attributes(self) -> Callable[[], None]:
        """Save which objects the attributes of the experiment are; return a function that puts them back."""
        attributes = attributes_of(self._experiment)
        before = dict(attributes)

        def put_back() -> None:
            attributes.clear()
            attributes.update(before)

        return put_back


def _has_gradients(value: Any, name: str) -> bool:
    return any(isinstance(thing, _WITH_GRADIENTS) for _, thing in _walk(value, name))


# -- for checkpoints -------------------------------------------------------------------------------------------------


class SavedState:
    """Save and load the declared state of an experiment: objects with a state, and plain values that the run changes.

    A plain value that is as it was when the run began is left to the code: of a resumed run it may say another one.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._made = {name: _mark(value) for name, value in experiment.state.items()}
        """What tells whether a value is as the experiment was made with it."""
        self._kept: set[str] = set()
        """Values that the run has changed once: saved from then on, also if they are as they were made again."""
        self._told: set[str] = set()
        """Changed values that cannot be saved."""
        attributes = attributes_of(experiment)
        for name, mark in self._made.items():
            if isinstance(mark, _Unsavable) and name not in attributes:  # the user's own `state` asks for it
                raise CheckpointError(f"experiment.state[{name!r}]: {mark.why}")

    def generators(self) -> list[Any]:
        """Return the declared generators, in an order that is the same in every process."""
        nodes = (thing for name, value in self._experiment.state.items() for _, thing in _walk(value, name))
        return [thing for thing in nodes if isinstance(thing, GENERATOR_TYPES)]

    def save(self) -> dict[str, Any]:
        """Return the state, without copying tensors."""
        experiment = self._experiment
        elsewhere = {id(getattr(experiment, name)) for name in _PARTS} | set(map(id, experiment.model.modules()))
        state = experiment.state
        for name in state.keys() - self._kept:
            self._compare(name, state[name])
        return {name: _saved(value, elsewhere) for name, value in state.items() if name in self._kept}

    def _compare(self, name: str, value: Any) -> None:
        """Keep a value that the run has changed; warn once of one that cannot be saved."""
        now, made = _mark(value), self._made.get(name)
        if not isinstance(now, _Unsavable):
            if now is None or now != made:
                self._kept.add(name)
            return
        is_as_made = isinstance(made, _Unsavable) and made.value is value
        if not is_as_made and name not in self._told:
            self._told.add(name)
            warn_user(
                f"experiment.{name} has changed and is not saved: {now.why} A resumed run begins with what the code "
                "gives it."
            )

    def check(self, saved: Mapping[str, Any], *, force: bool = False) -> None:
        """Refuse a saved state that does not fit; load nothing."""
        for name, state in saved.items():
            _check(self._experiment.state.get(name), state, f"experiment.{name}", force=force)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Set the experiment to a saved state, in place where others may refer to what it has."""
        live, attributes = self._experiment.state, attributes_of(self._experiment)
        self._kept |= saved.keys()
        for name, state in saved.items():
            value = _loaded(live.get(name), state, f"experiment.{name}")
            if name not in live or value is not live[name]:
                attributes[name] = value


class _Unsavable(NamedTuple):
    """A value that no checkpoint can hold."""

    value: Any
    why: str


def _mark(value: Any) -> int | _Unsavable | None:
    """Return a checksum of a plain value; None for one with objects that have a state, which are always saved."""
    if any(has_state(thing) for _, thing in _walk(value, "")):
        return None
    try:
        return digest({"it": _saved(value, set())})
    except CheckpointError as error:
        return _Unsavable(value, str(error))


def _saved(value: Any, elsewhere: set[int]) -> Any:
    """Return a value with a dictionary in place of each object; of one that is saved ``elsewhere``, an empty one."""
    if has_state(value):
        return {_STATE: None if id(value) in elsewhere else _state(value)}
    items = {key: _saved(item, elsewhere) for key, item in _items(value)}
    if is_record(value) or _is_named_tuple(value):
        return {_ATTRIBUTES: items}
    if isinstance(value, Enum) and value.name in type(value).__members__:  # flags together are no member
        return {_MEMBER: value.name}
    if isinstance(value, dict):
        return items
    if isinstance(value, deque):
        return deque(items.values(), value.maxlen)
    return type(value)(items.values()) if type(value) in (list, tuple) else value


def _state(thing: Any) -> dict[str, Any]:
    if isinstance(thing, nn.Module):
        return {"module": ModelState(thing).save(gradients=True)}
    if isinstance(thing, GENERATOR_TYPES):
        return {"generator": generator_states([thing])[0]}
    return {"state": state_of(thing, "the experiment")}


def _check(live: Any, saved: Any, name: str, *, force: bool) -> None:
    is_state = isinstance(saved, dict) and _STATE in saved
    is_attributes = isinstance(saved, dict) and _ATTRIBUTES in saved
    is_member = isinstance(saved, dict) and _MEMBER in saved
    if (
        (is_state and not has_state(live))
        or (is_attributes and not (is_record(live) or _is_named_tuple(live)))
        or (is_member and not (isinstance(live, Enum) and saved[_MEMBER] in type(live).__members__))
    ):
        raise ResumeError(
            f"The state of {name} was saved, and here it is {type_name(live)}. Nothing was loaded. Make it as it was."
        )
    if is_state:
        state = saved[_STATE] or {}
        if "module" in state:
            ModelState(live, f"module {name}").check(state["module"], force=force)
        elif "state" in state:
            check_state(live, state["state"], name, force=force)
        return
    there = dict(_items(live))
    for key, item in _items(saved[_ATTRIBUTES] if is_attributes else saved):
        _check(there.get(key), item, f"{name}[{key!r}]", force=force)


def _loaded(live: Any, saved: Any, name: str) -> Any:
    """Return what is to be in place of ``live``: itself, with what was saved in it, where that can be."""
    if isinstance(saved, dict) and _STATE in saved:
        _load(live, saved[_STATE] or {}, name)
        return live
    there = dict(_items(live))
    if isinstance(saved, dict) and _ATTRIBUTES in saved:
        found = {key: _loaded(there.get(key), item, name) for key, item in saved[_ATTRIBUTES].items()}
        if _is_named_tuple(live):
            return live._replace(**{key: value for key, value in found.items() if key in there})
        vars(live).update(found)
        return live
    if isinstance(saved, dict) and _MEMBER in saved:
        return type(live)[saved[_MEMBER]]
    if isinstance(saved, dict):
        saved = {key: _loaded(there.get(key), item, name) for key, item in saved.items()}
    elif isinstance(saved, list | tuple | deque):
        items = [_loaded(there.get(number), item, name) for number, item in enumerate(saved)]
        saved = deque(items, saved.maxlen) if isinstance(saved, deque) else type(saved)(items)
    return _filled(live, saved)


def _load(thing: Any, state: Mapping[str, Any], name: str) -> None:
    if "module" in state:
        ModelState(thing, name).load(state["module"])
    elif "generator" in state:
        set_generators([thing], [state["generator"]], name)
    elif "state" in state:
        load_state(thing, state["state"])


def _filled(live: Any, saved: Any) -> Any:
    """Put what was saved into the live tensor, array or container, if it is alike; return the one that has it."""
    if isinstance(live, Tensor) and isinstance(saved, Tensor):
        if (live.shape, live.dtype) != (saved.shape, saved.dtype) or live.is_inference():
            return saved
        with torch.no_grad():
            return live.copy_(saved)
    if isinstance(live, np.ndarray) and isinstance(saved, np.ndarray) and live.shape == saved.shape:
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


class CoreState:
    """Save and load what decides how training goes on, hooks apart."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self.own = SavedState(experiment)
        """What the experiment declares."""

    def save(self, *, gradients: bool) -> dict[str, Any]:
        """Return the state, without copying; with ``gradients``, which hooks may look at."""
        experiment = self._experiment
        # The usual step sets gradients to zero first; a step of one's own may look at those of before.
        gradients = gradients or experiment.has_own("train_step")
        return {
            "model": ModelState(experiment.model).save(gradients=gradients),
            **{name: state_of(getattr(experiment, name), name) for name in _PARTS},
            "own": self.own.save(),
            "streams": streams(experiment.model),
        }

    def before_epoch(self, before: PreEpochState | None, guarded: GuardedState) -> dict[str, Any] | None:
        """Return the state before the epoch, where a hook may go back to it: by going there, and coming back."""
        if before is None:
            return None
        put_back = guarded.save_attributes()
        try:
            with rollback(*guarded.parts(None)[:4]):
                before.restore()
                saved: dict[str, Any] = copied(self.save(gradients=True))
                return saved
        finally:
            put_back()

    def check(self, saved: Mapping[str, Any], *, force: bool) -> None:
        """Refuse a saved state that does not fit; load nothing."""
        ModelState(self._experiment.model).check(saved["model"], force=force)
        for name in _PARTS:
            check_state(getattr(self._experiment, name), saved[name], name, force=force)
        self.own.check(saved["own"], force=force)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Set everything to a saved state, each tensor in its place."""
        experiment = self._experiment
        ModelState(experiment.model).load(saved["model"])
        for name in _PARTS:
            load_state(getattr(experiment, name), saved[name])
        self.own.load(saved["own"])
        set_streams(saved["streams"], experiment.model)
