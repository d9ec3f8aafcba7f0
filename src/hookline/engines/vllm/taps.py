"""Fire hooks inside of a compiled model of vLLM: an operator at chosen modules, opaque to the compiler, runs them.

`WorkerHooks` puts `Taps` on the modules that the engine was started with (`StartOptions.taps`), before vLLM compiles:
Dynamo traces the operator into the graph. Its kernel is Python, and runs whatever hooks are on the module at that
moment, so hooks come and go without recompiling. What a hook returns is written into the output in place, as vLLM's
own attention writes its output: the next piece, and a CUDA graph of it, finds its input where it was.

    graph: layer 0 ──► tap(delta, residual, 0) ──► layer 1 …      kernel ──► Taps.run ──► slots of module 0
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.sites.module_hooks import Slot
from hookline.sites.targets import select

if TYPE_CHECKING:
    from torch import nn

    from hookline.engines.live_hooks import Place

logger = logging.getLogger("hookline.engines.vllm")


class _Running(threading.local):
    """The taps of the model whose forward this thread runs: compiled code has only numbers of modules."""

    taps: Taps | None = None


_RUNNING: Final = _Running()


def _run(delta: Tensor, residual: Tensor | None, number: int) -> None:
    taps = _RUNNING.taps
    if taps is not None:
        taps.run(number, delta, residual)


_LIBRARY: Final[Any] = torch.library.Library("hookline_vllm", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("tap(Tensor(a!) delta, Tensor(b!)? residual, int number) -> ()")
_LIBRARY.impl("tap", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("tap", lambda delta, residual, number: None, "Meta")


class Taps:
    """The tapped modules of one worker's model.

    Args:
        model: The model, loaded and not compiled.
        patterns: Names and patterns of modules, as hooks take them.
    """

    def __init__(self, model: nn.Module, patterns: Sequence[str]) -> None:
        found = dict(each for pattern in patterns for each in select(model, pattern))
        self.names = tuple(found)
        """By number."""
        self.reached: set[str] = set()
        """Modules whose tap has run, in the warm-up at the latest; others have an output that has no tap."""
        self._modules = tuple(found.values())
        self._has_logged = False
        for number, module in enumerate(self._modules):
            module.register_forward_hook(_tap_of(number))

    def reach(self, places: Iterable[Place]) -> bool:
        """Return whether hooks at all these places fire at taps."""
        return all(kind == "forward" and name in self.reached for name, kind in places)

    def begin(self) -> None:
        """Let the taps of the forward that begins in this thread run."""
        _RUNNING.taps = self

    def end(self) -> None:
        """Say that the forward is over."""
        _RUNNING.taps = None

    def run(self, number: int, delta: Tensor, residual: Tensor | None) -> None:
        """Run the hooks of a module on its output, and write there what they return; an error ends no engine."""
        self.reached.add(self.names[number])
        module = self._modules[number]
        slots = [hook for hook in module._forward_hooks.values() if isinstance(hook, Slot)]
        if not slots:
            return
        given = output = delta if residual is None else (delta, residual)
        try:
            for slot in slots:
                result = slot(module, (), output)
                output = output if result is None else result
            if output is not given:
                _write(given, output)
        except Exception:
            if not self._has_logged:
                self._has_logged = True
                logger.exception(
                    "hooks of %r raised in compiled code; further errors are not logged", self.names[number]
                )


def _tap_of(number: int) -> Any:
    def tap(module: nn.Module, args: Any, output: Any) -> None:
        # In an eager step torch calls the hooks themselves.
        if torch.compiler.is_compiling() and (tensors := _tensors_of(output)) is not None:
            torch.ops.hookline_vllm.tap(*tensors, number)

    return tap


def _tensors_of(output: Any) -> tuple[Tensor, Tensor | None] | None:
    """Return the tensors of an output as the operator takes them; None for an output of another form."""
    if isinstance(output, Tensor):
        return output, None
    if isinstance(output, tuple) and len(output) == 2 and all(isinstance(each, Tensor) for each in output):
        return output
    return None


def _write(given: Any, new: Any) -> None:
    """Put what a hook returned into the tensors of the output."""
    old, edited = [each if isinstance(each, tuple) else (each,) for each in (given, new)]
    if len(old) != len(edited) or any(
        not isinstance(b, Tensor) or a.shape != b.shape for a, b in zip(old, edited, strict=True)
    ):
        raise OptionError("A hook on a tapped module returns an output of the same form and shapes, and this does not.")
    kept = [value.clone() if any(value is place for place in old) else value for value in edited]
    for place, value in zip(old, kept, strict=True):
        place.copy_(value)
