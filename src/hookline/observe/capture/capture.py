"""Keep what flows through a model: outputs, inputs and gradients, by the names of the modules.

Users call `capture`. It checks the options, puts the hooks of a `CaptureRecorder` on modules, and returns a `Cache`.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from hookline.errors import OptionError
from hookline.observe.capture.cache import Cache
from hookline.observe.capture.calls import ValueStore
from hookline.observe.capture.recorder import CaptureRecorder
from hookline.observe.index import TokenAxes, parse_index
from hookline.phases import ALL_PHASES, PHASES, validate_phases
from hookline.sites.attach import attach_to_modules, new_attachment
from hookline.sites.hook_at_site import AttachOptions, open_context
from hookline.sites.kinds import Kind
from hookline.sites.receipt import likely_cause
from hookline.sites.roles import Layers, with_role
from hookline.sites.signature import HookTraits
from hookline.sites.targets import Named, check_model, choose

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookline.hook_types import Scope, Target
    from hookline.sites.hook_at_site import Attachment, HookAtSite

__all__ = ["capture"]

_OPTIONS: Final = AttachOptions(observe=True, name="capture")
_WITH_KWARGS: Final = AttachOptions(observe=True, with_kwargs=True, name="capture")
_READS_OUTPUT: Final = HookTraits(wants_site=False, may_edit=False, reads="o")
_NEVER_CALLED: Final = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def capture(
    model: nn.Module,
    targets: Target = None,
    *,
    role: str | None = None,
    layer: Layers = None,
    inputs: bool = False,
    grads: bool = False,
    clone: bool = False,
    detach: bool = False,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    index: Any = None,
    stop: bool = False,
    exclude: Target = None,
    scope: Scope = "context",
    during: str | Iterable[str] = PHASES,
    strict: bool = True,
) -> Cache:
    """Keep what modules of a model return, take in, and get back as gradients.

    Recipe::

        with hookline.capture(model, "layers.#", grads=True) as cache:
            model(x).sum().backward()
        cache["layers.3"].output  # .grad, and with inputs=True .inputs and .kwargs
        cache["layers.3"].calls[1].output  # of a module that is called several times

    Values are what everything downstream sees, after the edits of other hooks. They are kept as the module returned
    them, tensors by reference and with their graph: ``cache["layers.3"].output.sum().backward()`` works, and while the
    cache lives, so does the graph. Where such a tensor is changed in place afterwards, as
    ``nn.ReLU(inplace=True)`` does, reading it raises and asks for ``clone=True`` (changes that torch does not count,
    through ``.data`` or NumPy, go unnoticed); in inference mode, where torch counts none, tensors are copied. Compiled
    code shows copies without a graph. Every call is kept until ``cache.clear()``; one that activation checkpointing
    only repeats is not kept again, nor is one in a transform of ``torch.func`` or in ``torch.export``, whose tensors
    have no numbers of their own. Objects that are neither tensors nor containers, such as a key-value cache, are kept
    by reference as they are.

    Args:
        model: The model; names are relative to it.
        targets: Which modules, as in ``attach``.
        role: In place of ``targets``, the role of the modules in a language model: ``"resid"``, ``"attn"``, ``"mlp"``,
            ``"embed"``, ``"final_norm"``, ``"unembed"`` or ``"router"``; inside of attention ``"q"``, ``"k"``,
            ``"v"``, ``"pattern"``, ``"z"`` and ``"attn_out"``, by head.
        layer: With ``role``, the number of a block, several, or a slice; -1 is the last.
        inputs: Keep the arguments of each call too, as they were when it began.
        grads: Keep the gradients of the outputs too; they have the structure of the output, None where none came.
        clone: Keep copies, which no in-place operation reaches.
        detach: Keep tensors without their graph.
        device: Move what is kept there. From CUDA to ``"cpu"`` the copies go into pinned memory while the run goes on;
            who reads a value, or leaves the block, waits for them.
        dtype: Keep floating-point tensors in this type.
        index: Keep a part of each tensor that has dimensions: what goes between the brackets of ``tensor[…]``, or a
            function from tensor to tensor. ``(slice(None), -1)`` is the last token of (B, T, D). The rest is let go.
        stop: End the forward as soon as every target was captured once; the rest of the ``with`` block is skipped. It
            ends by a ``BaseException``, which passes a model that catches every ``Exception``.
        exclude: Modules to leave out, in the same grammar as ``targets``.
        scope: ``"context"``: capture the calls of this thread, or asyncio task, alone; ``"process"``: all calls.
        during: The phases to capture: ``"train"``, ``"eval"``, ``"intervention"``, or several. By default all of them,
            unlike ``watch``, which goes on for a whole run and counts training alone. The phase of the forward counts;
            gradients belong to theirs. The loops of hookline set the phase; elsewhere training is a forward that began
            in training mode with gradients on.
        strict: Raise if nothing matches; with False, warn and return a cache that stays empty.

    Raises:
        NoMatchError: (a KeyError) naming the nearest modules.
        OptionError: for an option that makes no sense, before anything is attached.
        CaptureError: (a RuntimeError) when a value is read that is not there, or not what it was, and, inside of the
            forward, for an ``index`` that does not fit.
    """
    check_model(model, targets)
    _check_flags(inputs=inputs, grads=grads, clone=clone, detach=detach, stop=stop, strict=strict)
    if scope not in ("context", "process"):
        raise OptionError(f"scope= is 'context' or 'process', got {scope!r}.")
    part = index if index is None or callable(index) else parse_index(index, new_dimensions=True)
    store = ValueStore(
        index=part,
        detach=detach,
        dtype=None if dtype is None else _parse_dtype(dtype),
        device=None if device is None else _parse_device(device),
        clone=clone,
    )
    recorder = CaptureRecorder(
        store,
        inputs=inputs,
        grads=grads,
        during=ALL_PHASES if during is PHASES else validate_phases(during),
        axes=TokenAxes.checking(model, part) if isinstance(part, tuple) else None,
    )
    chosen = choose(model, with_role(targets, role, layer=layer), exclude, strict=strict)
    if stop:
        recorder.stops_after = frozenset(name for name, module in chosen if not isinstance(module, _NEVER_CALLED))
    recorder.scope = open_context() if scope == "context" else None
    cache = Cache(recorder, weakref.ref(model))
    try:
        _attach(cache, recorder, model, chosen)
    except BaseException:
        cache.remove(quiet=True)
        raise
    return cache


def _begin(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Stand for the pre-hook that each module has of its own."""


def _end(module: nn.Module, args: Any, output: Any) -> None:
    """Stand for the forward hook that each module has of its own."""


def _attach(cache: Cache, recorder: CaptureRecorder, model: nn.Module, chosen: list[Named]) -> None:
    """Attach once for each kind of hook; each module gets hooks of its own, with its name."""

    def attach(
        kind: Kind, hook: Any, options: AttachOptions = _OPTIONS, traits: HookTraits | None = None
    ) -> Attachment:
        attachment = new_attachment(hook, kind, options, traits=traits)
        attachment.context = recorder.scope if kind is not Kind.FORWARD else None
        cache.handles[kind] = attach_to_modules(attachment, model, chosen)
        return attachment

    if recorder.opens_calls:
        reads = HookTraits(wants_site=False, may_edit=False, reads="ak" if recorder.takes_inputs else "")
        for entry in attach(Kind.FORWARD_PRE, _begin, _WITH_KWARGS, reads).entries:
            entry.hook = recorder.begin_hook(entry)
    if recorder.takes_grads:
        attach(Kind.BACKWARD_PRE, recorder.take_grads)
    for entry in attach(Kind.FORWARD, _end, traits=_READS_OUTPUT).entries:
        entry.hook = recorder.end_hook(entry)
        cache.reasons[entry.name] = functools.partial(_reason, entry, recorder)


def _reason(entry: HookAtSite, recorder: CaptureRecorder) -> str:
    """Return why nothing was captured."""
    attachment = entry.attachment
    if entry.name in recorder.left_out:
        return recorder.left_out[entry.name]
    if entry.counter.step <= entry.step_at_attach and not entry.fired:
        return "the model has not run since" if not attachment.removed else "the model did not run meanwhile"
    if entry.fired:
        return (
            "no call was made in the thread, or asyncio task, that opened the capture; scope='process' captures "
            "those of others too, and cache.clear() forgets"
        )
    return likely_cause(entry, attachment)


# -- options -------------------------------------------------------------------------------------------------


def _parse_device(device: Any) -> torch.device:
    """Return a device that this process has; raise for others."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise OptionError(f"device= is a device such as 'cpu' or 'cuda:0', got {device!r} ({first}).") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"device={device!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices.")
    return found


def _parse_dtype(dtype: Any) -> torch.dtype:
    """Return a dtype of real numbers to keep floating-point tensors in."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptionError(
            f"dtype= is a floating-point type such as torch.bfloat16 or 'float16', got {dtype!r}; tensors of other "
            "types are kept as they are."
        )
    return found


def _check_flags(**flags: Any) -> None:
    """Raise for an option that is neither True nor False, and for two that exclude each other."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise OptionError(f"{name}= is True or False, got {value!r}.")
    if flags.get("stop") and flags.get("grads"):
        raise OptionError(
            "stop=True ends the forward before there is a loss, so no gradient would come: drop stop= or grads=."
        )
