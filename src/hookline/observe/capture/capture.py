"""Keeping what flows through a model: outputs, inputs, gradients, by the names of the modules.

Takes a model and targets from the user, puts the hooks of a `Recorder` on them, hands out a `Cache`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from hookline.lifecycle.run_phase import PHASES, checked_phases
from hookline.observe.capture.cache import Cache
from hookline.observe.capture.capture_hooks import Recorder
from hookline.observe.capture.capture_options import (
    check_flags,
    check_scope,
    parse_device,
    parse_dtype,
    parse_index,
    parse_limit,
)
from hookline.observe.capture.stored_value import Store
from hookline.sites.attach import attach_to_modules, new_attachment
from hookline.sites.kinds import Kind
from hookline.sites.modules.call_context import open_context
from hookline.sites.receipt import likely_cause
from hookline.sites.select import Named, check_model, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import nn

    from hookline.hook_types import Hook, Scope, Target
    from hookline.sites.hook_at_site import Attachment, HookAtSite

__all__ = ["capture"]


def capture(
    model: nn.Module,
    targets: Target,
    *,
    inputs: bool = False,
    grads: bool = False,
    clone: bool = False,
    detach: bool = False,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    index: Any = None,
    stop: bool = False,
    limit: int | str | None = None,
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
    cache lives, so does the graph. Where somebody changes such a tensor in place afterwards, as
    ``nn.ReLU(inplace=True)`` does, reading it raises and asks for ``clone=True`` (changes that torch does not count,
    through ``.data`` or NumPy, go unnoticed); in inference mode, where torch counts none, tensors are copied. Compiled
    code shows copies without a graph. Every call is kept until ``cache.clear()``; one that activation checkpointing
    only repeats is not kept again, nor is one in a transform of ``torch.func`` or in ``torch.export``, whose tensors
    have no numbers of their own. Objects that are neither tensors nor containers, such as a key-value cache, are kept
    by reference as they are.

    Args:
        model: The model; names are relative to it.
        targets: Which modules, as in ``attach``.
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
        limit: The most bytes to keep, as a number or as ``"2GB"``; more is an error that says where it happened. What
            is kept by reference counts with the whole memory that it is a view of, and memory that is shared once.
        exclude: Modules to leave out, in the same grammar as ``targets``.
        scope: ``"context"``: capture the calls of this thread, or asyncio task, alone; ``"process"``: all calls.
        during: What the run has to be doing: ``"train"``, ``"eval"``, ``"intervention"``, or several. By default all of
            them, unlike ``watch``, which goes on for a whole run and counts training alone: who opens a capture around
            an evaluation means that one. It is the forward that counts; gradients belong to theirs. The loops of
            hookline tell; elsewhere training is a forward that began in training mode with gradients on.
        strict: Raise if nothing matches; with False, warn and return a cache that stays empty.

    Raises:
        NoMatchError: (a KeyError) naming the nearest modules.
        OptionError: for an option that makes no sense, before anything is attached.
        CaptureError: (a RuntimeError) when a value is read that is not there, or not what it was, and, inside of the
            forward, for an ``index`` that does not fit and for what goes over the ``limit``.
    """
    check_model(model, targets)
    check_flags(inputs=inputs, grads=grads, clone=clone, detach=detach, stop=stop, strict=strict)
    check_scope(scope)
    store = Store(
        index=parse_index(index),
        detach=detach,
        dtype=parse_dtype(dtype),
        device=parse_device(device),
        clone=clone,
        limit=parse_limit(limit),
    )
    recorder = Recorder(store, inputs=inputs, grads=grads, stop=stop, during=checked_phases(during))
    chosen = choose(model, targets, exclude, strict=strict)
    cache = Cache(recorder, weakref.ref(model), open_context() if scope == "context" else None)
    try:
        _attach(cache, recorder, model, chosen)
    except BaseException:
        cache.remove(quiet=True)
        raise
    return cache


def _requests(recorder: Recorder) -> dict[Kind, Attachment]:
    """What to attach, on nothing yet, in the order to do it."""
    found = {}
    if recorder.in_full:
        found[Kind.FORWARD_PRE] = _request(_begin, Kind.FORWARD_PRE, with_kwargs=True)
        found[Kind.FORWARD_PRE].reads = "ak" if recorder.takes_inputs else ""
    if recorder.takes_grads:
        found[Kind.BACKWARD_PRE] = _request(recorder.take_grads, Kind.BACKWARD_PRE)
    found[Kind.FORWARD] = _request(_end, Kind.FORWARD)
    found[Kind.FORWARD].reads = "o"
    return found


def _request(hook: Hook, kind: Kind, *, with_kwargs: bool = False) -> Attachment:
    return new_attachment(hook, kind, observe=True, with_kwargs=with_kwargs, name="capture")


def _begin(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Stands for the pre-hook that each module has of its own."""


def _end(module: nn.Module, args: Any, output: Any) -> None:
    """Stands for the forward hook that each module has of its own."""


def _attach(cache: Cache, recorder: Recorder, model: nn.Module, chosen: list[Named]) -> None:
    """One attachment for each kind of hook; each module gets a hook of its own, which knows its name."""
    for name, module in chosen:
        recorder.expect(name, module)
    for kind, attachment in _requests(recorder).items():
        is_plain = kind is Kind.FORWARD and not recorder.in_full
        attachment.context = None if is_plain else cache.scope  # a plain hook asks by itself
        cache.handles[kind] = attach_to_modules(attachment, model, chosen)
        for entry in attachment.entries:
            if is_plain:
                entry.hook = recorder.noting(entry, cache.scope)
            elif kind is Kind.FORWARD:
                entry.hook = recorder.closing(entry)
            elif kind is Kind.FORWARD_PRE:
                entry.hook = recorder.opening(entry)
            if kind is Kind.FORWARD:
                cache.reasons[entry.name] = _reason(entry, recorder)


def _reason(entry: HookAtSite, recorder: Recorder) -> Callable[[], str]:
    """Why nothing was captured, in words, when somebody asks."""

    def why() -> str:
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

    return why
