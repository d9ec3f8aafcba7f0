"""Define the operators that stand for hooks in a compiled graph.

``trace_hooks``, ``compiled_gradients`` and ``graph_passes`` put them into graphs while the compiler works. When the
graph runs, the functions of ``op_runtime`` run behind them. The compiler cannot look into them, so the Python behind
them may do anything. It may not drop them, because they are declared to have side effects. Each is given the key of a
`ModuleHooks` (``module_hooks``). The hooks that are on when the operator runs count, so removal takes effect at once.

``begin``  a model's forward begins; whether with gradients on, which the graph itself cannot see when it runs
``fire``   observers of a forward: the structure as a text (``value_layout``), tensors and numbers beside it
``count``  a hook that edits, and is therefore part of the graph itself, has run
``sink``   a summary that the graph has made for a hook, in the forward or the backward
``sink_all``  many of them in one call: on an H200 each ``sink`` takes 95 µs of the host, next to a launch of 9 µs.
           ``graph_passes`` puts it in, and reads the arguments of both by position: change their schemas with it
``enter``, ``leave``  watch the gradients of one call (``compiled_gradients``); gone from the graph once it is traced
``note``   notes, in the forward, which call this is; its result goes with the gradients
``grads``, ``edit``  gradient hooks that watch, or may return gradients; each takes in the result of the one before,
           because without a reason the compiler keeps no order

Two calls with the same arguments would be taken for one, so a call of ``begin``, ``note``, ``fire``, ``count`` or
``sink`` has a serial number in its graph, as an argument or in its text. It counts from 0 in each compilation, so that
the compiler's caches find the same graph again.

A new operator is a line above, a `_define` with its schema, a function `behind` it (in ``op_runtime``) or one
`while_tracing` (in ``compiled_gradients``), a call in ``trace_hooks`` or ``compiled_gradients``, and a test in
tests/sites/compiled. observe/watch/graph.py has two more operators in the same library: names must differ. Graphs on
the disk know an operator by its name: one that means something else needs another name. A new `Summary` is given to the
``summary`` of an `Attachment`, as observe/watch/hooks.py and factories/streaming_stats.py do; ``module_hooks`` and
``compiled_gradients.plan_of`` keep what makes it (`keep_maker`).

An operator gets memory that the compiled program uses again, so hooks get copies. A gradient may be edited behind an
operator because nothing differentiates a compiled backward; ``edit`` refuses where something would.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hookline.sites import _torch

Found: TypeAlias = tuple[list[Tensor], int]
"""What a graph has found, and a number that is known while it is traced: the last two arguments of ``sink``. The number
says how many numbers each entry stands for (`Share.each`); 1 for a tensor as it is."""


class Share(NamedTuple):
    """What one site has of the tensors that ``sink_all`` is handed: some of them, or rows of all.

    `line_of` writes the fields in this order. graph.py and kernel.py of observe/watch take the first three in it.
    """

    first: int
    """The number of the first of its tensors, or of its rows in each of them."""
    number: int
    """How many are its own."""
    each: int
    """The number of `Found`: how many numbers each entry stands for; 1 if a tensor is handed over as it is."""
    in_rows: bool = False
    """Whether its own are rows, because what several sites have found was joined."""

    def of(self, found: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of this site alone."""
        own = slice(self.first, self.first + self.number)
        return [part[own] for part in found] if self.in_rows else list(found[own])


def line_of(key: int, share: Share, text: str) -> str:
    """Return what `read_line` reads: the number of the key, the share, the text of the ``sink``, which is one line."""
    return " ".join((str(key), *(str(int(field)) for field in share), text))


def read_line(line: str) -> tuple[int, Share, str]:
    """Return the number of the key, the share, and the text of the ``sink``."""
    key, first, number, each, in_rows, text = line.split(" ", 5)
    return int(key), Share(int(first), int(number), int(each), in_rows == "1"), text


class Summary(ABC):
    """Stands for an observer in compiled code: the graph makes small tensors, which it receives.

    The compiler fuses that with whatever made the tensors; only these come out.
    """

    number: int
    """Another for each `make` that makes something else, and the same in each process: graphs on the disk have it."""

    make: Callable[[list[Tensor]], Found | None]
    """Returns what is found in the tensors of an output, or in its gradients; None for nothing. It is traced."""

    @abstractmethod
    def prepare(self, sites: Sequence[tuple[str, Any, Share]]) -> Callable[[list[Tensor]], None]:
        """Return what takes the tensors of each call of one operator; ``sites`` are names, modules and shares.

        It is used until any hook comes or goes. The graph soon uses the memory of the tensors again. What is returned
        must not keep a module alive.
        """


MAKERS: Final[dict[int, Callable[[list[Tensor]], Found | None]]] = {}
"""What makes the summary of each number: graphs have the number alone. There are as many as there are sets of
statistics in use."""


def keep_maker(summary: Summary) -> int:
    """Return the number of a summary, by which `MAKERS` has what makes it."""
    MAKERS[summary.number] = summary.make
    return summary.number


_LIBRARY: Final[Any] = torch.library.Library("hookline", "DEF")  # type: ignore[no-untyped-call]


def _define(name: str, schema: str) -> Any:
    # A CUDA graph would record the call once and never make it again.
    _LIBRARY.define(name + schema, tags=(torch.Tag.cudagraph_unsafe,))
    op: Any = getattr(torch.ops.hookline, name).default
    torch.fx.node.has_side_effect(op)
    return op


BEGIN: Final = _define("begin", "(Tensor key, int serial, bool gradients) -> Tensor")
FIRE: Final = _define("fire", "(Tensor key, str what, Tensor[] tensors, SymInt[] numbers, Tensor[] reals) -> ()")
COUNT: Final = _define("count", "(Tensor key, str what) -> ()")
SINK: Final = _define("sink", "(Tensor key, str what, Tensor[] found, int each) -> ()")
SINK_ALL: Final = _define("sink_all", "(Tensor[] keys, str what, Tensor[] found) -> ()")
ENTER: Final = _define("enter", "(Tensor key, str plan, Tensor[] tensors) -> Tensor[]")
LEAVE: Final = _define("leave", "(Tensor key, str plan, Tensor[] tensors) -> Tensor[]")
NOTE: Final = _define("note", "(Tensor key, int serial) -> Tensor")
GRADS: Final = _define("grads", "(Tensor key, Tensor note, str what, Tensor? after, Tensor[] tensors) -> Tensor")
EDIT: Final = _define("edit", "(Tensor key, Tensor note, str what, Tensor? after, Tensor[] tensors) -> Tensor[]")


def behind(op: Any, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the function that runs behind ``op``; ``fake`` returns its result in a dry run."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = op.name().partition("::")[2]

        def run(*args: Any) -> Any:
            # Here, and not below autograd like other operators, so that a hook may differentiate what it likes.
            return _torch.below_autograd(op, args) if _torch.is_tracing() else function(*args)

        _LIBRARY.impl(name, run, "Autograd")
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"hookline::{name}", fake, lib=_LIBRARY)
        return function

    return register


def while_tracing(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate what ``op`` does where autograd records: in the dry runs with fake tensors behind the compiler's front.

    What is left of the operator below autograd hands its tensors back.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = op.name().partition("::")[2]
        _LIBRARY.impl(name, function, "Autograd")
        _LIBRARY.impl(name, lambda key, plan, tensors: list(tensors), "CompositeExplicitAutograd")
        return function

    return register
