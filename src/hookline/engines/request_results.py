"""Keep what requests asked of an engine until their clients fetch it: hidden states, what hooks did, flags of probes.

The adapters of vLLM and SGLang have one `RequestResults` each; our own server puts all of it into the answer instead.
A request asks with a plain object (`RequestOptions`). What is wrong with it is its result, and harms nobody else. The
functions at the end know what modules of these engines are like; nothing here imports either engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch import nn

from hookline.engines.hidden_states import RequestStates, StateSource
from hookline.engines.request_options import RequestOptions, remembered, split_key
from hookline.errors import HookNameError, NoMatchError, OptionError
from hookline.factories.request_notes import RequestFlag, merge_flags
from hookline.sites.receipt import cause_around
from hookline.sites.targets import select
from hookline.sites.wrappers import submodule
from hookline.specs.hook_spec import HookSpec

if TYPE_CHECKING:
    from hookline.engines.live_hooks import PreparedHooks
    from hookline.engines.session import Session

logger = logging.getLogger("hookline.engines")

_MOST_KEPT: Final = 4096
"""Keys under which results wait to be taken."""


class BegunRequest(NamedTuple):
    """What an engine knows of a request when it begins."""

    id: str
    """The engine's own id, by which rows are found."""
    name: str
    """What users call it. No two that run have one; what an earlier one has left under it is dropped."""
    options: Any
    """What it asks for, an object or its JSON, see `RequestOptions`; None if nobody will come for results."""
    prompt: int
    """How many tokens its prompt has."""
    not_computed: int = 0
    """How many of them no hook sees."""
    place: tuple[int, ...] = ()
    """Where it stands among the answers under one key."""


@dataclass(eq=False)
class _Result:
    """One request, from its beginning until its client has taken what it left."""

    request: BegunRequest
    key: str
    states: RequestStates | None = None
    hooks: PreparedHooks | None = None
    error: Exception | None = None
    has_ended: bool = False
    hook_results: list[dict[str, Any]] = field(default_factory=list)
    flags: list[RequestFlag] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its states."""
        return 0 if self.states is None else self.states.nbytes


class RequestResults:
    """The requests of one worker that asked for something, and what was found for them.

    Args:
        session: Where their hooks go, and their hidden states come from.
        most_bytes: How much the hidden states of all of them together may take.
        allow: What paths of factories of their hooks may begin with, beside ``hookline.factories``.
        check: Raises if no hook can fire in this engine.
        tp_size: Into how many parts tensor parallelism cuts outputs.
    """

    def __init__(
        self,
        session: Session,
        *,
        most_bytes: int = 1 << 30,
        allow: Sequence[str] | None = None,
        check: Callable[[], object] = lambda: None,
        tp_size: int = 1,
    ) -> None:
        self._session = session
        self._most_bytes = most_bytes
        self._allow = allow
        self._check = check
        self._has_logged = False
        self._sources = remembered(partial(find_sources, session.model, tp_size))
        self._running: dict[str, _Result] = {}
        """By the engine's own id."""
        self._kept: dict[str, list[_Result]] = {}
        """What waits to be taken, by key; in the order in which the first request under it was kept."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of hidden states that are held."""
        return sum(result.nbytes for results in self._kept.values() for result in results)

    def open(self, request: BegunRequest) -> None:
        """Begin with a request; what is wrong with its options is its result."""
        self._kept.pop(request.name, None)
        if request.options is None:
            return
        result = self._running[request.id] = _Result(request, request.name)
        try:
            self._begin(result)
        except Exception as error:
            logger.warning("request %r: %s", request.name, error)
            self._keep(result)
            self._end(result)
            result.error = error
        self._make_room()

    def _begin(self, result: _Result) -> None:
        request = result.request
        key, given = split_key(request.options)
        result.key = key or request.name  # first of all: what is wrong with the rest is told under it
        asked = RequestOptions.read(given)
        self._keep(result)
        self._check()
        check_no_stop(asked.hooks)
        session, wanted = self._session, asked.hidden_states
        if wanted is not None:
            wanted.check(request.prompt)
            result.states = RequestStates(request.id, wanted, request.prompt, self._sources(wanted.layers, wanted.of))
            session.states.open(result.states)
        if asked.hooks:
            result.hooks = session.of_requests.prepare(request.id, asked.hooks, self._allow)
            for live in result.hooks.hooks:
                check_called(session.model, live.spec.target_modules)
            result.hooks.open()

    def _keep(self, result: _Result) -> None:
        kept = self._kept.setdefault(result.key, [])
        if result not in kept:
            kept.append(result)

    def close(self, id: str) -> None:
        """Stop with what a request has asked for; what was found stays until it is taken."""
        result = self._running.pop(id, None)
        if result is not None:
            self._end(result)

    def _end(self, result: _Result) -> None:
        result.has_ended = True
        if result.states is not None:
            self._session.states.close(result.states)
        if result.hooks is not None:
            result.hook_results, result.hooks = result.hooks.close(), None

    def collect(self, ids: Mapping[str, str]) -> None:
        """Take what the last step gave; raise nothing, as the answers of that step are there.

        Args:
            ids: The engine's own id of each request of the step, by its name.
        """
        try:
            for name, flags in self._session.collect().items():
                result = self._running.get(ids[name])
                if result is not None:  # others have nobody who would come for them
                    result.flags = merge_flags([*result.flags, *flags])
            self._make_room()
        except Exception as error:
            self.give_up("what hooks found in a step could not be read", error)

    def give_up(self, what: str, error: Exception) -> None:
        """Fail the states of all running requests, as nobody knows which tokens of a step were theirs; log it once."""
        for result in self._running.values():
            if result.states is not None:
                result.states.fail(OptionError(f"For a request's own results, {what} ({error!r})."))
                self._session.states.close(result.states)
        if not self._has_logged:
            self._has_logged = True
            logger.error("%s; hooks do not know whose tokens they see", what, exc_info=error)

    def _make_room(self) -> None:
        """Keep what is held within its bounds: drop what ended longest ago and nobody took, then fail the largest."""
        if not self._is_too_much():
            return
        ended = [key for key, results in self._kept.items() if all(result.has_ended for result in results)]
        for key in ended:
            logger.info("what was found for request %r was not taken, and is dropped", key)
            del self._kept[key]
            if not self._is_too_much():
                return
        while self.nbytes > self._most_bytes:
            held = (result for results in self._kept.values() for result in results)
            states = max(held, key=lambda each: each.nbytes).states
            assert states is not None  # it has bytes
            text = (
                f"Hidden states of all requests together may take {self._most_bytes} bytes (captured_bytes), and these "
                "do not fit; ask for fewer layers or positions, or take those of earlier requests."
            )
            states.fail(OptionError(text))
            self._session.states.close(states)

    def _is_too_much(self) -> bool:
        return len(self._kept) > _MOST_KEPT or self.nbytes > self._most_bytes

    # -- answers ----------------------------------------------------------------------------------------------

    def take(self, key: str) -> list[dict[str, Any]]:
        """Return what was found for the requests under a key as plain data, one entry for each, and forget it.

        Raises:
            HookNameError: There is nothing under that key.
        """
        results = self._kept.pop(key, None)
        if results is None:
            raise HookNameError(
                f"Nothing is kept for {key!r}: the request did not ask for anything, has not begun, or it was taken or "
                "dropped."
            )
        return [self._taken(result) for result in sorted(results, key=lambda each: each.request.place)]

    def _taken(self, result: _Result) -> dict[str, Any]:
        self._end(result)
        plain: dict[str, Any] = {
            "request": result.request.name,
            "prompt_tokens": result.request.prompt,
            "not_computed": result.request.not_computed,
            "hooks": result.hook_results,
            "flags": [flag.to_plain(stopped=False) for flag in result.flags],
            "states": {},
            "silent": {},
            "error": None,
        }
        try:
            plain |= self._taken_states(result)
        except Exception as error:
            plain["error"] = error_to_plain(error)
        result.states, result.error, result.hook_results, result.flags = None, None, [], []
        return plain

    def _taken_states(self, result: _Result) -> dict[str, Any]:
        states = result.states
        error = result.error or (None if states is None else states.error)
        if error is not None:
            raise error
        if states is None:
            return {}
        silent = {source.title: self._why_silent(source) for source in states.silent}
        if silent and len(silent) == len(states.sources):
            raise OptionError("; ".join(f"{name!r}: {cause}" for name, cause in silent.items()) + ".")
        found = {name: layer.to_plain() for name, layer in states.result().items() if name not in silent}
        return {"states": found, "silent": silent}

    def _why_silent(self, source: StateSource) -> str:
        """Return why a module did not fire in a step."""
        model = self._session.model
        module = submodule(model, source.module) if source.module else model
        cause = never_called(module) or cause_around(model, source.module, module)
        return cause or "it was not called in a step of the request"

    def clear(self) -> None:
        """Forget all requests."""
        for id in list(self._running):
            self.close(id)
        self._kept.clear()


def error_to_plain(error: Exception) -> dict[str, str]:
    """Return an error as plain data, for another process; of a KeyError, without the quotes that Python adds."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return {"type": type(error).__name__, "message": text}


# -- modules of vLLM and SGLang ------------------------------------------------------------------------------------

# Their models have three habits: decoder layers return (delta, residual), projections are fused, and tensor parallelism
# cuts outputs into columns. Classes are known by their names and attributes.


def find_sources(model: nn.Module, tp_size: int, layers: Sequence[str], of: str) -> list[StateSource]:
    """Return the sources that names or globs select; raise if one selects none, or what each worker has a part of.

    A name of transformers that the engine has fused into another (``q_proj`` into ``qkv_proj``) selects that part.
    """
    found = dict.fromkeys(source for layer in dict.fromkeys(layers) for source in _sources(model, layer, of))
    modules = dict(model.named_modules(remove_duplicate=False))
    for source in found:
        if tp_size > 1 and _is_cut(modules.get(source.module), of):
            raise OptionError(
                f"{source.title!r}: each worker has a part of its {of}; ask for o_proj, down_proj, a norm or a block, "
                "or attach hookline.factories:export, which writes the part of each."
            )
    return list(found)


def _sources(model: nn.Module, layer: str, of: str) -> Iterator[StateSource]:
    try:
        found = select(model, layer)
    except NoMatchError:
        head, _, last = layer.rpartition(".")
        packed = getattr(model, "packed_modules_mapping", None) or {}
        fused = next((name for name, parts in packed.items() if last in parts), None)
        if fused is None:
            raise
        place = list(packed[fused]).index(last)
        for name, module in select(model, f"{head}.{fused}" if head else fused):
            title = f"{name.rpartition('.')[0]}.{last}".lstrip(".")
            yield StateSource(name, of, title, _columns(module, place) if of == "output" else None)
        return
    for name, _ in found:
        yield StateSource(name, of)


def _columns(module: nn.Module, place: int) -> tuple[int, int] | None:
    sizes = [int(size) for size in getattr(module, "output_partition_sizes", None) or ()]
    return (sum(sizes[:place]), sum(sizes[: place + 1])) if sizes else None


def _is_cut(module: nn.Module | None, of: str) -> bool:
    """Return whether tensor parallelism has cut what a module returns or takes."""
    kind = type(module).__name__
    if of == "input":
        return kind == "RowParallelLinear" and bool(getattr(module, "input_is_parallel", False))
    return ("ColumnParallel" in kind or kind == "QKVParallelLinear") and not getattr(module, "gather_output", False)


def never_called(module: nn.Module | None) -> str | None:
    """Return why the engine does not call a module of this class; None if it does."""
    if type(module).__name__ == "ParallelLMHead":
        return "the engine reads the weights of this module and never calls it; hook 'logits_processor' instead"
    return None


def check_called(model: nn.Module, names: Sequence[str]) -> None:
    """Raise for a hook on modules of which the engine calls none; beside others, they are told as silent."""
    causes = [never_called(submodule(model, name.partition(":")[0]) if name else model) for name in names]
    if causes and all(causes):
        raise OptionError(f"A hook on {', '.join(map(repr, names))} would never fire: {causes[0]}.")


def check_no_stop(specs: Sequence[HookSpec | Mapping[str, Any]]) -> None:
    """Raise for a probe that is to end answers: these engines end theirs by themselves."""
    for spec in specs:
        given = vars(spec) if isinstance(spec, HookSpec) else spec
        is_probe = str(given.get("hook_factory")).replace(":", ".").rpartition(".")[2] == "probe"
        if is_probe and (given.get("config") or {}).get("action") == "stop":
            raise OptionError("action='stop' ends no answer on this engine; use action='flag', and cancel the request.")
