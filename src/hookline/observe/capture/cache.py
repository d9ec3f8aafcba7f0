"""Hold what a capture has recorded, by the names of the modules.

``capture`` makes a `Cache` and its recorder fills it; `cache_files` writes and reads it. It is also the handle of the
hooks: they come off with ``remove()``, or at the end of a ``with`` block, and what it holds stays.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor

from hookline.errors import CaptureError, NoMatchError
from hookline.messages import counted, nearest_names
from hookline.notebook_html import line
from hookline.observe.capture.capture_hooks import CaptureRecorder, CaptureStopped
from hookline.observe.capture.captured_calls import CapturedCall
from hookline.observe.capture.stored_value import (
    AS_IT_IS,
    StoredValue,
    bytes_of,
    size_text,
)
from hookline.sites.compiled.value_layout import Unseen
from hookline.sites.handle import HookHandle
from hookline.sites.hook_at_site import close_context
from hookline.sites.kinds import Kind
from hookline.sites.wrappers import submodule
from hookline.tables import OFF, ON, THE_MODEL, ShownAsTable, Table
from hookline.tree import main_of, map_tensors, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

__all__ = ["Cache", "Captured"]

_MAX_ROWS: Final = 60
_MAX_MAPS: Final = 12
"""Heat maps that a notebook shows at once: 10 kB each at most."""
_MORE_TENSORS: Final = "+1: .output has one more tensor; the one whose shape is shown is .tensor"
_PICKLED: Final = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, Unseen)
_CHANGED: Final = -1
"""A version that no tensor has: reading a copy of what was overwritten raises, as with the original."""
_FORWARD_PRE: Final = Kind.FORWARD_PRE


class Captured:
    """The calls that were captured of one module.

    Recipe: ``cache["layers.3"].output``, or ``.calls[i].output`` where the module was called more than once.
    ``.tensor`` is the main tensor of an output that is a tuple or dict, as that of attention. ``.inputs`` and
    ``.kwargs`` want ``inputs=True``, ``.grad`` wants ``grads=True``.
    """

    __slots__ = ("_why_none", "calls", "name")

    def __init__(self, name: str, calls: tuple[CapturedCall, ...], why_none: Callable[[str], str]) -> None:
        self.name = name
        """The name of the module."""
        self.calls = calls
        """Its calls, in the order they ended."""
        self._why_none = why_none

    @property
    def output(self) -> Any:
        """The output of the module, in its structure."""
        calls = self.calls
        return (calls[0] if len(calls) == 1 else self._only("output")).output

    @property
    def tensor(self) -> Tensor:
        """The main tensor of the output, the one that ``patch`` edits: of a tuple or dict the first of real numbers."""
        return self._only("tensor").tensor

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The positional arguments, as the module got them."""
        return self._only("inputs").inputs

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments."""
        return self._only("kwargs").kwargs

    @property
    def grad(self) -> Any:
        """The gradient of the output, in its structure; None if there was none."""
        return self._only("grad").grad

    def _only(self, attribute: str) -> CapturedCall:
        calls = self.calls
        if len(calls) == 1:
            return calls[0]
        if not calls:
            raise CaptureError(f"Nothing was captured of {self.name!r}: {self._why_none(self.name)}.")
        steps = len({call.step for call in calls})
        forwards = f" in {steps} forwards of the model" if steps > 1 else ""
        raise CaptureError(
            f"{self.name!r} was called {len(calls)} times{forwards}, so .{attribute} does not say which is meant; use "
            f".calls[i].{attribute} with i from 0 to {len(calls) - 1}, or cache.clear() before each forward."
        )

    def __repr__(self) -> str:
        return f"<Captured {self.name!r}, {len(self.calls)} call{'' if len(self.calls) == 1 else 's'}>"

    def _repr_html_(self) -> str:
        more = line(f"… and {len(self.calls) - _MAX_MAPS:,} more calls") if len(self.calls) > _MAX_MAPS else ""
        return line(repr(self)) + "".join(call._repr_html_() for call in self.calls[:_MAX_MAPS]) + more


class Cache(ShownAsTable, Mapping[str, Captured]):
    """Captured modules by name, in the order in which they were first captured; prints as a table.

    Recipe: ``with hookline.capture(model, "layers.#") as cache: model(x)``, then ``cache["layers.3"].output``, or
    ``for name, captured in cache.items(): ...``; ``cache.save("run.safetensors")`` and
    ``hookline.observe.Cache.load("run.safetensors")``.

    A module that was to be captured and never was called is no key, but can be asked for: its ``.output`` says why.

    ``copy.copy`` shares the tensors with their graphs; ``copy.deepcopy`` and ``pickle`` copy them without, and a pickle
    has a note of its class for an object that is no tensor, container or number, as ``save`` has. None captures
    any more. A model that keeps a cache of its own activations and is deep-copied has an empty one in the copy.
    """

    def __init__(
        self,
        recorder: CaptureRecorder | None = None,
        model: Callable[[], nn.Module | None] = lambda: None,
        scope: int | None = None,
    ) -> None:
        self._recorder = recorder or CaptureRecorder(AS_IT_IS, inputs=False, grads=False, stop=False)
        self._model = model
        self._calls: dict[str, list[CapturedCall]] = {}
        self._sorting = threading.Lock()
        self._is_closed = False
        """Whether its hooks are off, or never were on."""
        self.scope = scope
        """The number of the context it captures for; None for the whole process."""
        self.handles: dict[Kind, HookHandle] = {}
        """The hooks, one attachment for each kind."""
        self.reasons: dict[str, Callable[[], str]] = {}
        """For each module that is to be captured, a function that says why it was not."""

    # -- what was captured -------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules that were captured, in the order in which they first were."""
        return tuple(self._sorted())

    @property
    def bytes(self) -> int:
        """The memory that the captured tensors keep; what several of them share counts once."""
        return bytes_of(tensor for calls in [*self._sorted().values()] for tensor in _tensors_in(calls))

    def __getitem__(self, name: str) -> Captured:
        calls = self._sorted()
        if name not in calls and name not in self.reasons:
            name = self._resolve(name)
        return Captured(name, tuple(calls.get(name, ())), self._why_none)

    def __contains__(self, name: object) -> bool:
        return name in self._sorted()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self._sorted())

    def _table(self) -> Table:
        calls = self._sorted()
        if not calls:
            return Table(title=f"Cache of {counted(len(self.reasons), 'module')}, none captured yet")
        rows = [_cells(*item) for item in calls.items()]
        num_calls = counted(sum(map(len, calls.values())), "call")
        foot = [f"{counted(len(calls), 'module')}, {num_calls}, {size_text(self.bytes)}"]
        foot += [_MORE_TENSORS] if any(" +" in row[1] for row in rows) else []
        header = ("name", "output", "dtype", "calls", "size")
        return Table(header, rows, numbers=(3, 4), foot=foot, most=_MAX_ROWS)

    def _repr_html_(self) -> str:
        """Return the table and, folded, heat maps of the first modules; to draw these waits for their device."""
        first = [*self._sorted().values()][:_MAX_MAPS]
        maps = "".join(calls[0]._repr_html_() for calls in first)
        folded = f"<details><summary>heat maps</summary>{maps}</details>" if maps else ""
        return super()._repr_html_() + folded

    def _state(self) -> str:
        """Return whether it captures, and how to have it stop."""
        return OFF if self._is_closed else ON

    # -- coming off, starting over, keeping --------------------------------------------------------------

    def remove(self, *, quiet: bool = False) -> None:
        """Take the hooks off; what was captured stays. Warn, unless ``quiet``, of modules that were never called."""
        silent, self._is_closed = False, True
        try:
            for kind, handle in reversed(self.handles.items()):  # forward, gradients, what opens calls
                handle.remove(quiet=quiet or silent or kind is _FORWARD_PRE)
                # One warning for what was not called: it has no gradient either.
                silent = len(self.handles) > 1 and bool(handle.report().silent)
        finally:
            if self.scope is not None:
                close_context(self.scope)
            recorder = self._recorder
            if recorder.wait is not None:
                recorder.wait()
            self._sorted()  # from here on only the cache holds the calls
            if recorder.opens_calls:
                recorder.release()

    def clear(self) -> None:
        """Forget what was captured; the hooks stay on."""
        with self._sorting:
            self._recorder.clear()
            self._calls.clear()

    def save(self, path: str | Path) -> Path:
        """Write everything to a safetensors file, in a folder that is there; return the path.

        Tensors, steps, numbers of calls and structures are kept; a ModelOutput or other mapping or dataclass comes back
        as a dict, a named tuple as a tuple, and an object that is none of these as a note of its class.
        """
        from hookline.observe.capture.cache_files import write

        return write(path, self._sorted())

    @classmethod
    def load(cls, path: str | Path) -> Cache:
        """Read what ``save`` has written. Nothing is unpickled."""
        from hookline.observe.capture.cache_files import read

        return _closed_cache(read(path), {})

    def __enter__(self) -> Self:
        if self._is_closed:
            raise CaptureError(
                "This cache is closed, and would capture nothing: its hooks came off at the end of its `with` block, "
                "or it was loaded or copied. What it holds stays readable; for more, open another hl.capture(...)."
            )
        self._recorder.can_stop = True
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        self._recorder.can_stop = False
        self.remove(quiet=error is not None)
        return isinstance(error, CaptureStopped) and error.owner is self._recorder

    # Copies hold what was captured and have no hooks.

    def __copy__(self) -> Cache:
        calls = {name: list(calls) for name, calls in self._sorted().items()}
        return _closed_cache(calls, self._reasons_in_words(), self._model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        model = self._model()
        if model is not None and any(id(module) in memo for module in model.modules()):
            # It is the model that is copied, and holds the cache. The twin has not run, and has no hooks either.
            return Cache()
        return _closed_cache(_copied_calls(self._sorted(), clone=True), self._reasons_in_words())

    def __reduce__(self) -> tuple[Any, ...]:
        return _closed_cache, (_copied_calls(self._sorted(), clone=False), self._reasons_in_words())

    # -- inside ------------------------------------------------------------------------------------------

    def _sorted(self) -> dict[str, list[CapturedCall]]:
        """Return the calls by module, with the latest from the recorder."""
        if self._recorder.notes:
            with self._sorting:
                for call in self._recorder.take_calls():
                    self._calls.setdefault(call.name, []).append(call)
        return self._calls

    def _reasons_in_words(self) -> dict[str, Callable[[], str]]:
        """Return why modules were not captured, as it is now, for a copy."""
        return {name: functools.partial(str, why()) for name, why in self.reasons.items() if name not in self._calls}

    def _why_none(self, name: str) -> str:
        return self.reasons[name]() if name in self.reasons else "the file has no call of it"

    def _resolve(self, name: str) -> str:
        """Return the name under which a module was captured: shared modules have several, wrappers add prefixes."""
        model = self._model()
        known = {**self.reasons, **self._calls}
        if model is not None and isinstance(name, str):
            try:
                meant = submodule(model, name)
            except AttributeError:
                meant = None
            for other in known if meant is not None else ():
                if submodule(model, other) is meant:
                    return other
        if isinstance(name, int) and not isinstance(name, bool):
            raise NoMatchError(f"A cache is read by the names of modules: cache[cache.names[{name}]].")
        near = nearest_names(str(name), known)
        hint = f"nearest: {', '.join(map(repr, near))}" if near else "nothing was"
        raise NoMatchError(f"{name!r} was not captured; {hint}. All names: cache.names.")


def _closed_cache(
    calls: dict[str, list[CapturedCall]],
    reasons: dict[str, Callable[[], str]],
    model: Callable[[], nn.Module | None] = lambda: None,
) -> Cache:
    """Return a cache that holds these calls and captures no more."""
    cache = Cache(model=model)
    cache._calls, cache.reasons, cache._is_closed = calls, reasons, True
    return cache


def _copied_calls(calls: dict[str, list[CapturedCall]], *, clone: bool) -> dict[str, list[CapturedCall]]:
    """Return the same calls without their graphs; with ``clone`` in memory of their own, else fit to be pickled."""
    copied: dict[int, Tensor] = {}

    def one(tensor: Tensor) -> Tensor:
        if id(tensor) not in copied:  # what is in two places is one tensor in the copy as well
            copied[id(tensor)] = tensor.detach().clone() if clone else tensor.detach()
        return copied[id(tensor)]

    def copy_of(kept: StoredValue) -> StoredValue:
        changed = [tensor for tensor, version in kept.borrowed if tensor._version != version]
        other = (lambda leaf: leaf) if clone else _for_pickle
        value = map_tensors(kept.value, lambda path, tensor: one(tensor), other)
        return StoredValue(value, tuple((one(tensor), _CHANGED) for tensor in changed))

    return {name: [call.copied(copy_of) for call in of_module] for name, of_module in calls.items()}


def _for_pickle(leaf: Any) -> Any:
    """Return a number or the like as it is; of an object, which may not allow pickling, its class."""
    kind = type(leaf)
    return leaf if isinstance(leaf, _PICKLED) else Unseen(f"{kind.__module__}.{kind.__qualname__}")


def _tensors_in(calls: list[CapturedCall]) -> Iterator[Tensor]:
    for call in calls:
        for kept in call.kept().values():
            for one in (kept,) if isinstance(kept, StoredValue) else kept:
                yield from tensors_of(one.value)


def _cells(name: str, calls: list[CapturedCall]) -> tuple[str, ...]:
    first = tensors_of(calls[0].kept_output.value)
    main = main_of(first)
    others = f" +{len(first) - 1}" if len(first) > 1 else ""
    shape = type(calls[0].kept_output.value).__name__ if main is None else f"{tuple(main.shape)}{others}"
    dtype = "–" if main is None else str(main.dtype).removeprefix("torch.")
    return name or THE_MODEL, shape, dtype, str(len(calls)), size_text(bytes_of(_tensors_in(calls)))
