"""Hold what a capture has recorded, by the names of the modules, and write it to a file.

``capture`` makes a `Cache` over its recorder. It is also the handle of the hooks: they come off with ``remove()``, or
at the end of a ``with`` block, and what it holds stays.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import torch
from torch import Tensor

from hookline.errors import CaptureError, NoMatchError
from hookline.files import replace_file
from hookline.messages import counted, nearest_names, size_text, type_name
from hookline.observe.capture.calls import AS_IT_IS, Captured, CapturedCall, StoredValue, bytes_of
from hookline.observe.capture.recorder import CaptureRecorder, CaptureStopped
from hookline.sites.compiled.value_layout import Unseen
from hookline.sites.handle import HookHandle
from hookline.sites.hook_at_site import close_context
from hookline.sites.kinds import Kind
from hookline.sites.wrappers import submodule
from hookline.tables import OFF, ON, THE_MODEL, ShownAsTable, Table
from hookline.tree import children, main_of, map_tensors, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["Cache", "Captured"]

_Calls: TypeAlias = dict[str, list[CapturedCall]]
_MAX_ROWS: Final = 60
_MAX_MAPS: Final = 12
"""Heat maps that a notebook shows at once: 10 kB each at most."""
_MORE_TENSORS: Final = "+1: .output has one more tensor; the one whose shape is shown is .tensor"
_CHANGED: Final = -1
"""A version that no tensor has: reading a copy of what was overwritten raises, as with the original."""


class Cache(ShownAsTable, Mapping[str, Captured]):
    """Captured modules by name, in the order in which they were first captured; prints as a table.

    Recipe: ``with hookline.capture(model, "layers.#") as cache: model(x)``, then ``cache["layers.3"].output``, or
    ``for name, captured in cache.items(): ...``; ``cache.save("run.safetensors")`` and
    ``hookline.observe.Cache.load("run.safetensors")``.

    A module that was to be captured and never was called is no key, but can be asked for: its ``.output`` says why.
    Copies and pickles hold the tensors without their graphs, and a note of its class for an object that is no tensor,
    container or number; they capture no more.
    """

    def __init__(self, recorder: CaptureRecorder, model: Callable[[], nn.Module | None] = lambda: None) -> None:
        self._recorder = recorder
        self._model = model
        self._calls = recorder.calls
        self._is_closed = False
        """Whether its hooks are off, or never were on."""
        self.handles: dict[Kind, HookHandle] = {}
        """The hooks, one attachment for each kind."""
        self.reasons: dict[str, Callable[[], str]] = {}
        """For each module that is to be captured, a function that says why it was not."""

    # -- what was captured -------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules that were captured, in the order in which they first were."""
        return tuple(self._calls)

    @property
    def bytes(self) -> int:
        """The memory that the captured tensors keep; what several of them share counts once."""
        return bytes_of(tensor for calls in [*self._calls.values()] for call in calls for tensor in call.tensors())

    def __getitem__(self, name: str) -> Captured:
        if name not in self._calls and name not in self.reasons:
            name = self._resolve(name)
        return Captured(name, tuple(self._calls.get(name, ())), self._why_none)

    def __contains__(self, name: object) -> bool:
        return name in self._calls

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self._calls)

    def _table(self) -> Table:
        calls = dict(self._calls)
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
        maps = "".join(calls[0]._repr_html_() for calls in [*self._calls.values()][:_MAX_MAPS])
        folded = f"<details><summary>heat maps</summary>{maps}</details>" if maps else ""
        return super()._repr_html_() + folded

    def _state(self) -> str:
        """Return whether it captures, and how to have it stop."""
        return OFF if self._is_closed else ON

    # -- coming off, starting over, keeping --------------------------------------------------------------

    def remove(self, *, quiet: bool = False) -> None:
        """Take the hooks off; what was captured stays. Warn, unless ``quiet``, of modules that were never called."""
        if self._is_closed:
            return
        silent, self._is_closed = False, True
        try:
            for kind, handle in reversed(self.handles.items()):  # forward, gradients, what opens calls
                handle.remove(quiet=quiet or silent or kind is Kind.FORWARD_PRE)
                # One warning for what was not called: it has no gradient either.
                silent = len(self.handles) > 1 and bool(handle.report().silent)
        finally:
            if self._recorder.scope is not None:
                close_context(self._recorder.scope)
            self._calls = self._recorder.release()

    def clear(self) -> None:
        """Forget what was captured; the hooks stay on."""
        self._recorder.clear()
        self._calls.clear()

    def save(self, path: str | Path) -> Path:
        """Write everything to a safetensors file, in a folder that is there; return the path.

        Tensors, steps, numbers of calls and structures are kept; a ModelOutput or other mapping or dataclass comes back
        as a dict, a named tuple as a tuple, and an object that is none of these as a note of its class.
        """
        path = Path(path)
        _write(path, self._calls)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Cache:
        """Read what ``save`` has written. Nothing is unpickled."""
        return _closed_cache(_read(Path(path)), {})

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

    def __reduce__(self) -> tuple[Any, ...]:
        calls = dict(self._calls)
        reasons = {name: functools.partial(str, why()) for name, why in self.reasons.items() if name not in calls}
        return _closed_cache, (_without_graphs(calls), reasons)

    # -- inside ------------------------------------------------------------------------------------------

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


def _cells(name: str, calls: list[CapturedCall]) -> tuple[str, ...]:
    output = calls[0].values["output"].value
    tensors = tensors_of(output)
    main = main_of(tensors)
    others = f" +{len(tensors) - 1}" if len(tensors) > 1 else ""
    shape = type(output).__name__ if main is None else f"{tuple(main.shape)}{others}"
    dtype = "–" if main is None else str(main.dtype).removeprefix("torch.")
    size = bytes_of(tensor for call in calls for tensor in call.tensors())
    return name or THE_MODEL, shape, dtype, str(len(calls)), size_text(size)


# -- copies ----------------------------------------------------------------------------------------------------------


def _closed_cache(calls: _Calls, reasons: dict[str, Callable[[], str]]) -> Cache:
    """Return a cache that holds these calls and captures no more."""
    cache = Cache(CaptureRecorder(AS_IT_IS))
    cache._calls, cache.reasons, cache._is_closed = calls, reasons, True
    return cache


def _without_graphs(calls: _Calls) -> _Calls:
    """Return the same calls, fit to be pickled; what is in two places is one tensor there as well."""
    detached: dict[int, Tensor] = {}

    def one(tensor: Tensor) -> Tensor:
        return detached.setdefault(id(tensor), tensor.detach())

    def copy_of(kept: StoredValue) -> StoredValue:
        value = map_tensors(kept.value, lambda path, tensor: one(tensor), _for_pickle)
        return StoredValue(value, tuple((one(tensor), _CHANGED) for tensor in kept.changed()))

    return {name: [call.copied(copy_of) for call in of_module] for name, of_module in calls.items()}


def _for_pickle(leaf: Any) -> Any:
    """Return a number or the like as it is; of an object, which may not allow pickling, its class."""
    plain = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)
    return leaf if isinstance(leaf, plain) else _note_of(leaf)


def _note_of(value: Any) -> Unseen:
    kind = type(value)
    return value if isinstance(value, Unseen) else Unseen(f"{kind.__module__}.{kind.__qualname__}")


# -- files -----------------------------------------------------------------------------------------------------------
#
# A safetensors file. The tensors are numbered; its metadata says as JSON which number belongs where: names, steps,
# calls, and the structures they were in. A structure is a list that begins with its kind: ["tensor", "3"],
# ["tuple", …], ["dict", ["key", …], …], ["value", 1.5], ["object", "some.Class"].

_KEY: Final = "hookline.capture"
_VERSION: Final = 1
_PLAIN: Final = (str, int, float, bool, type(None))


def _write(path: Path, calls: _Calls) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if not path.parent.is_dir():
        raise CaptureError(f"{path} cannot be written: there is no folder {path.parent}. Make it before, os.makedirs.")
    if path.is_dir():
        raise CaptureError(f"{path} is a folder: give the path of a file, such as {path / 'run.safetensors'}.")
    tensors = _FileTensors()
    sites = [
        {"name": name, "calls": [_call_as_json(call, tensors) for call in of_module]}
        for name, of_module in calls.items()
    ]
    about = {_KEY: json.dumps({"version": _VERSION, "sites": sites}), "format": "pt"}
    try:
        replace_file(path, lambda draft: save_file(tensors.numbered, draft, metadata=about))
    except (OSError, SafetensorError, KeyError) as error:  # KeyError: a dtype that the format does not have
        raise CaptureError(
            f"{path} could not be written ({error!r}); use index= to convert what it cannot hold."
        ) from error


class _FileTensors:
    """The tensors of a file, each once, in memory of its own, as the format wants them."""

    def __init__(self) -> None:
        self.numbered: dict[str, Tensor] = {}
        self._numbers: dict[int, str] = {}

    def add(self, tensor: Tensor, what: str) -> str:
        """Return the number of a tensor."""
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
            kind = "on the meta device" if tensor.is_meta else f"a {type(tensor).__name__} ({tensor.layout})"
            raise CaptureError(f"The {what} is {kind}, which a safetensors file cannot hold; use index= to convert it.")
        number = self._numbers.setdefault(id(tensor), str(len(self._numbers)))
        if number not in self.numbered:
            # Always a copy: the format takes neither two tensors on one memory, nor parts of a larger one, nor numbers
            # that torch only marks as conjugate or negative.
            plain = tensor.detach().cpu().resolve_conj().resolve_neg()
            self.numbered[number] = plain.clone(memory_format=torch.contiguous_format)
        return number


def _call_as_json(call: CapturedCall, tensors: _FileTensors) -> dict[str, Any]:
    about: dict[str, Any] = {"step": call.step, "call": call.call}
    about["output"] = _as_json(call.output, tensors, f"output of {call.name!r}")
    if "inputs" in call.values:
        about["inputs"] = _as_json(call.inputs, tensors, f"input of {call.name!r}")
        about["kwargs"] = _as_json(call.kwargs, tensors, f"input of {call.name!r}")
    if call.gradients is not None:
        about["grads"] = [_as_json(grad, tensors, f"gradient of {call.name!r}") for grad in call.grads]
    return about


def _as_json(value: Any, tensors: _FileTensors, what: str, above: tuple[int, ...] = ()) -> list[Any]:
    if isinstance(value, Tensor):
        return ["tensor", tensors.add(value, what)]
    if isinstance(value, _PLAIN):
        return ["value", value]
    if id(value) in above:
        raise CaptureError(f"The {what} contains itself, which no file can hold; capture a module inside of it.")
    parts = children(value)
    if parts is None:
        return ["object", _note_of(value).kind]
    odd = [key for key, _ in parts if not isinstance(key, _PLAIN)]
    if odd:
        raise CaptureError(
            f"The {what} has keys such as {odd[0]!r}, {type_name(odd[0])}, which a file cannot hold: keys are texts, "
            "numbers or None. Capture a module inside of it."
        )
    items = [(key, _as_json(item, tensors, what, (*above, id(value)))) for key, item in parts]
    if isinstance(value, tuple | list):
        return ["tuple" if isinstance(value, tuple) else "list", *(item for _, item in items)]
    return ["dict", *([key, item] for key, item in items)]


def _read(path: Path) -> _Calls:
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        raise CaptureError(f"{path} is a folder: give the path of a file that Cache.save() has written.")
    try:
        with safe_open(str(path), framework="pt") as file:
            about = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()} if about is not None else {}  # noqa: SIM118
    except SafetensorError as error:
        raise CaptureError(f"{path} is no safetensors file that can be read ({error}).") from error
    if about is None:
        raise CaptureError(f"{path} was not written by Cache.save(): there is no {_KEY!r} in its metadata.")
    try:
        found = json.loads(about)
        if found["version"] != _VERSION:
            raise CaptureError(f"{path} is of version {found['version']}, this hookline reads {_VERSION}; update it.")
        sites = found["sites"]
        return {site["name"]: [_call_of_json(site["name"], call, tensors) for call in site["calls"]] for site in sites}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CaptureError(f"{path} is damaged: its metadata does not fit its tensors ({error!r}).") from error


def _call_of_json(name: str, about: dict[str, Any], tensors: dict[str, Tensor]) -> CapturedCall:
    grads = tuple(StoredValue(_of_json(grad, tensors)) for grad in about.get("grads", ()))
    call = CapturedCall(name, about["step"], about["call"], grads if "grads" in about else None)
    call.values = {"output": StoredValue(_of_json(about["output"], tensors))}
    for key in ("inputs", "kwargs"):
        if key in about:
            call.values[key] = StoredValue(_of_json(about[key], tensors))
    return call


def _of_json(about: list[Any], tensors: dict[str, Tensor]) -> Any:
    kind, *parts = about
    if kind == "tensor":
        return tensors[parts[0]]
    if kind == "dict":
        return {key: _of_json(item, tensors) for key, item in parts}
    if kind == "value":
        return parts[0]
    if kind == "object":
        return Unseen(str(parts[0]))
    if kind in ("tuple", "list"):
        items = [_of_json(item, tensors) for item in parts]
        return tuple(items) if kind == "tuple" else items
    raise ValueError(f"unknown kind {kind!r}")
