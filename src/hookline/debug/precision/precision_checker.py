"""Check what flows through the modules and functions of a model, forward and backward: `PrecisionChecker`.

Users make one. It attaches observers (`attach_everywhere`, `attach_function`), measures each tensor
(``tensor_numbers``), and writes a line of each (``precision_files``).
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor, nn

from hookline.debug.precision.precision_record import (
    PrecisionConfig,
    PrecisionContext,
    PrecisionFiles,
    PrecisionRecord,
    hash_of,
    local_copy,
    measure,
    numbers_text,
)
from hookline.errors import NonFiniteError, OptionError, TargetError
from hookline.messages import type_name
from hookline.sites.attach import attach
from hookline.sites.everywhere import attach_everywhere
from hookline.sites.functions.attach_function import attach_function
from hookline.sites.functions.function_names import find_places
from hookline.sites.handle import HandleSet
from hookline.sites.site_info import FunctionSite, Site
from hookline.sites.wrappers import clean_modules
from hookline.tables import OFF, ON
from hookline.tree import leaves

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from hookline.hook_types import Hook

__all__ = ["PrecisionChecker"]


_KEPT: Final = 100_000
"""Records kept in memory; a record is about 400 bytes."""
_FUNCTIONS: Final = "torch.*"
"""The functions of level 2: those of torch that a forward calls by name."""
_QUESTIONS: Final = [
    *("*.__get__", "*.size", "*.stride", "*.dim", "*.numel", "*.is_*", "*.item", "*.tolist", "*.data_ptr"),
    *("*.__len__", "*.__bool__", "*.__repr__", "*.__format__", "*.__hash__", "*.get_device", "*.element_size"),
]
"""Functions that only ask a tensor something; each would write a line of the same tensor once more."""
_OWN_CHECKS: Final = ("check_nan", "check_inf", "abort_on_error")


class PrecisionChecker:
    """Check what flows through a model, and write a line for each tensor.

    Recipe::

        with hookline.PrecisionChecker(model, "level=1,path=checks,format=simple") as checker:
            for iteration, batch in enumerate(batches):
                checker.set_iteration(iteration)
                train_step(batch)
        print(checker.errors, checker.folder)

    Level 1 checks the outputs of every module and the gradients that arrive at them. Level 2 also checks what the
    functions of torch take and give, in the forward and in the backward. Level 0 attaches nothing and writes nothing.
    Each tensor is copied to the host: this is a tool to look with, not one to leave on. The run keeps every bit.

    Args:
        model: The model; None: every module that is called in this process.
        config: ``level=1,path=x,format=md5,save_tensors=true``, a dict, or a `PrecisionConfig`.
        options: The same keys as keywords; they go before ``config``.

    Raises:
        OptionError: for an unknown key, an item without ``=``, a value that does not fit.
        NonFiniteError: from a forward or backward, with ``abort_on_error``.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        config: str | Mapping[str, Any] | PrecisionConfig | None = None,
        **options: Any,
    ) -> None:
        if isinstance(model, str | Mapping | PrecisionConfig) and config is None:
            raise TargetError(f"The first argument is the model; write PrecisionChecker(config={model!r}).")
        if model is not None and not isinstance(model, nn.Module):
            raise TargetError(f"PrecisionChecker takes a torch.nn.Module, got {type_name(model)}.")
        self.config = PrecisionConfig.make(config, options)
        """The options."""
        self._model = None if model is None else weakref.ref(model)
        self._context = PrecisionContext()
        self._lock = threading.Lock()
        self._busy = threading.local()
        self._counters: dict[tuple[str, str], int] = defaultdict(int)
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._manual: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._files = PrecisionFiles(self.config.path, save=bool(self.config.save_tensors))
        self._general = HandleSet()
        self._function_outputs = HandleSet()
        self._own = HandleSet()
        self.records: deque[PrecisionRecord] = deque(maxlen=_KEPT)
        """The tensors checked since `reset_counters`, at most 100,000."""
        self.errors: list[PrecisionRecord] = []
        """Those with NaN or infinity since the checker was made."""
        self.init()

    # -- on and off --------------------------------------------------------------------------------------------

    def init(self) -> None:
        """Attach the hooks of the level; called again, also after `remove`, the hooks are on once."""
        self._general.remove(quiet=True)
        model = None if self._model is None else self._model()
        attach_to_all: Any = attach_everywhere if model is None else partial(attach, model, "*")
        if self.config.level >= 1:
            self._general = HandleSet(
                [
                    attach_to_all(self._see_outputs, observe=True, name="PrecisionChecker"),
                    attach_to_all(self._see_gradients, on="backward_pre", observe=True, name="PrecisionChecker"),
                ]
            )
        if self.config.level >= 2:
            handles = self._function_handles(_FUNCTIONS, "", model, self.config)
            self._general = HandleSet([*self._general, *handles])
            self._function_outputs = HandleSet(handles[1:2])

    def register_for_module(self, module: nn.Module, name: str = "", **checks: bool) -> HandleSet:
        """Check one module with options of its own: its outputs, and the gradients of its inputs.

        Args:
            module: The module; the hooks of the level leave it alone from now on.
            name: Its name in the lines; its name in the model, or its class, if empty.
            checks: ``check_nan``, ``check_inf``, ``abort_on_error``.
        """
        config = self._with(checks)
        handles = HandleSet()
        if self.config.level:
            if name:
                self._names[module] = name

            def outputs(called: nn.Module, args: Any, output: Any, *, site: Site) -> None:
                self._of_module(called, site, "forward", output, config)

            def gradients(called: nn.Module, grad_input: Any, grad_output: Any, *, site: Site) -> None:
                self._of_module(called, site, "backward", grad_input, config)

            options: dict[str, Any] = {"observe": True, "name": "PrecisionChecker"}
            handles = HandleSet(
                [attach(module, outputs, **options), attach(module, gradients, on="backward", **options)]
            )
            self._manual.add(module)
            self._own = HandleSet([*self._own, *handles])
        return handles

    def register_for_function(self, function: Any, name: str = "", **checks: bool) -> HandleSet:
        """Check functions with options of their own: what they take and give, forward and, but for operators, backward.

        Args:
            function: As for `attach_function`: a function of torch, an operator, a subclass of
                ``torch.autograd.Function``, a glob over their names.
            name: The name in the lines; the function's own if empty.
            checks: ``check_nan``, ``check_inf``, ``abort_on_error``.
        """
        config = self._with(checks)
        handles = HandleSet()
        if self.config.level:
            model = None if self._model is None else self._model()
            handles = HandleSet(self._function_handles(function, name, model, config))
            self._own = HandleSet([*self._own, *handles])
        return handles

    def remove(self, *, quiet: bool = False) -> None:
        """Take all hooks off and close the log; may be repeated.

        Warn, unless ``quiet``, if level 2 has seen no function although the model ran (in compiled code, say).
        """
        self._function_outputs.remove(quiet=quiet)
        self._general.remove(quiet=True)
        self._own.remove(quiet=True)
        self._manual.clear()
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove(quiet=exc_info[0] is not None)

    # -- where the run stands ----------------------------------------------------------------------------------

    def set_gas(self, gas: int) -> None:
        """Say which micro-batch of a gradient accumulation runs now: ``[GAS-gas]``."""
        self._context.change(gas=gas)

    def set_layer(self, layer: int | None) -> None:
        """Say which layer runs now: ``[L-layer]``; None goes back to the number in the module's name."""
        self._context.change(layer=layer)

    def set_layer_name(self, name: str) -> None:
        """Say what the layer that runs now is called; an empty name says nothing."""
        self._context.change(layer_name=name)

    def set_iteration(self, iteration: int | None) -> None:
        """Say which iteration begins: ``[I-iteration]``; the counters begin anew."""
        self._context.change(iteration=iteration)
        self.reset_counters()

    def reset(self) -> None:
        """Forget micro-batch, layer, layer name and iteration of this thread."""
        self._context.change(gas=0, layer=None, layer_name="", iteration=None)

    def reset_counters(self) -> None:
        """Count calls from 0 again, as each iteration should: its files then replace those of the one before."""
        with self._lock:
            self._counters.clear()
            self.records.clear()

    def build_name_map(self, root: nn.Module) -> dict[str, nn.Module]:
        """Name modules by their path in ``root`` from now on, and return the names; ``root`` itself has none."""
        found = {name: module for name, module in clean_modules(root) if name}
        for name, module in found.items():
            self._names[module] = name
        return found

    @property
    def folder(self) -> Path | None:
        """The folder with the log and the tensors; None before the first line."""
        return self._files.folder

    # -- hooks -------------------------------------------------------------------------------------------------

    def _see_outputs(self, module: nn.Module, args: Any, output: Any, *, site: Site) -> None:
        if module not in self._manual:
            self._of_module(module, site, "forward", output, self.config)

    def _see_gradients(self, module: nn.Module, grad_output: Any, *, site: Site) -> None:
        if module not in self._manual:
            self._of_module(module, site, "backward", grad_output, self.config)

    def _of_module(self, module: nn.Module, site: Site, stage: str, value: Any, config: PrecisionConfig) -> None:
        if not site.recompute:  # it repeats a forward that has been checked
            name = self._names.get(module) or site.name or type(module).__name__
            self._check(name, stage, value, config)

    def _function_handles(
        self, function: Any, name: str, model: nn.Module | None, config: PrecisionConfig
    ) -> list[RemovableHandle]:
        """Attach to functions, for what they take, give, are sent and send on, in this order."""

        def taken(fn: FunctionSite, inputs: Any) -> None:
            self._of_function(fn, name, "forward_input", inputs, config)

        def given(fn: FunctionSite, inputs: Any, outputs: Any) -> None:
            self._of_function(fn, name, "forward", outputs, config)

        def arrived(fn: FunctionSite, grad_outputs: Any) -> None:
            self._of_function(fn, name, "backward", grad_outputs, config)

        def sent(fn: FunctionSite, grad_inputs: Any, grad_outputs: Any) -> None:
            self._of_function(fn, name, "backward_input", grad_inputs, config)

        hooks: dict[str, Hook] = {"forward_pre": taken, "forward": given}
        if not any(place.is_operator for place in find_places(function)):  # which have no gradients
            hooks |= {"backward_pre": arrived, "backward": sent}
        handles = HandleSet()
        try:
            for kind, hook in hooks.items():
                handles.add(
                    attach_function(
                        function,
                        hook,
                        on=kind,
                        within=model,
                        exclude=_QUESTIONS if function == _FUNCTIONS else None,
                        observe=True,
                        name="PrecisionChecker",
                    )
                )
        except BaseException:
            handles.remove(quiet=True)
            raise
        return list(handles)

    def _of_function(self, fn: FunctionSite, name: str, stage: str, value: Any, config: PrecisionConfig) -> None:
        if fn.recompute:
            return
        called = name or fn.name
        self._check(f"{fn.module}@{called}" if fn.module else called, stage, value, config)

    # -- checking ----------------------------------------------------------------------------------------------

    def _with(self, checks: Mapping[str, bool]) -> PrecisionConfig:
        unknown = [key for key in checks if key not in _OWN_CHECKS]
        if unknown:
            raise OptionError(f"One module or function has the options {', '.join(_OWN_CHECKS)}, not {unknown[0]!r}.")
        return PrecisionConfig.make(self.config, checks)

    def _check(self, name: str, stage: str, value: Any, config: PrecisionConfig) -> None:
        """Write a line for each tensor in ``value``; raise after the last if one is bad and that was asked for."""
        # Numbered by their places, so that a gradient that is None moves no other.
        tensors = [(place, leaf) for place, (_, leaf) in enumerate(leaves(value)) if isinstance(leaf, Tensor)]
        if not tensors or getattr(self._busy, "now", False):  # at level 2, what is called here would be checked too
            return
        with self._lock:
            index = self._counters[name, stage]
            self._counters[name, stage] += 1
        self._busy.now = True
        try:
            with torch.no_grad():
                checked = [self._checked(name, stage, index, *each, config) for each in tensors]
        finally:
            self._busy.now = False
        bad = next((record for record in checked if record is not None and record.is_error), None)
        if bad is not None and config.abort_on_error:
            raise NonFiniteError(f"Precision check failed, aborting! {bad} (all lines: {self.folder})")

    def _checked(
        self, name: str, stage: str, index: int, number: int, tensor: Tensor, config: PrecisionConfig
    ) -> PrecisionRecord | None:
        plain = local_copy(tensor)
        if plain is None:
            return None
        numbers = measure(plain)
        hashed = config.format == "md5"
        record = PrecisionRecord(
            name=name,
            stage=stage,
            index=index,
            tensor=number,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(plain.shape),
            numbers=f"md5={hash_of(plain, config.md5_tolerance)}" if hashed else numbers_text(numbers, plain),
            nan=numbers.nan,
            inf=numbers.inf,
            is_error=bool((config.check_nan and numbers.nan) or (config.check_inf and numbers.inf)),
            context=self._context.state.text(_layer_in(name)),
        )
        self._keep(record, plain)
        return record

    def _keep(self, record: PrecisionRecord, plain: Tensor) -> None:
        self._files.write(str(record), record.stem, plain)
        with self._lock:
            self.records.append(record)
            if record.is_error and len(self.errors) < _KEPT:
                self.errors.append(record)

    def __repr__(self) -> str:
        state = ON if any(not handle.removed for handle in (*self._general, *self._own)) else OFF
        return f"<PrecisionChecker level {self.config.level}, {len(self.errors)} errors, in {self.folder}; {state}>"


def _layer_in(name: str) -> int | None:
    """Return the first part of the name that is a number: 3 for ``model.layers.3.mlp``."""
    return next((int(part) for part in name.partition("@")[0].split(".") if part.isdigit()), None)
