"""Give out the data of an experiment, one pass after the other; save how far a pass has come, and get there again.

A `Run` has a `Passes`, from which the adapters of trainers derive; `Saving` gives it `SavedPasses`. A loader gets back
to where it was by its own ``state_dict()``, or by iterating it again from the streams that the pass began with and
skipping what was used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset

from hookline.errors import OptionError, ResumeError
from hookline.guard.loaders import datasets_of, generators_of_loader, samplers_of
from hookline.guard.rng import RandomStates
from hookline.training.experiment import Experiment, grouped, has_state
from hookline.training.state import RunState, generator_states, set_generators, set_streams, streams

__all__ = ["Passes", "SavedPasses"]

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

    def __init__(self, experiment: Experiment, state: RunState, *, replay: bool) -> None:
        super().__init__(experiment)
        self._state = state
        self._replay = replay
        self._before: dict[str, Any] = {}
        self._start: dict[str, Any] = {}

    @property
    def can_go_on(self) -> bool:
        """True if a run can be saved in the middle of a pass over these data."""
        loader = self.loader
        if loader is None or self._replay or has_state(loader):
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
