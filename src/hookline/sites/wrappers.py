"""Look through modules that only wrap another one, and name modules as if nothing were wrapped.

`_INNER` lists the wrappers: ``torch.compile``, DDP, FSDP, DataParallel, activation checkpointing, weight averaging and
PEFT. Each keeps the module it wraps as a child, and the key of that child sits in every name below. Names from this
file leave these keys out. Users write such names and files keep them, so they have to be the same however a model is
wrapped. A wrapper is known by the type of the parent: a user's own attribute called ``module`` is kept in names.

Much of the package calls this file. To list modules, ``targets``, ``roles``, ``find`` and others call `walk`;
``debug``, ``analyses``, ``sglang`` and others `clean_modules`. ``module_hooks``, ``watch``, ``serve`` and others call
`unwrap` for the model that is meant. ``capture``, ``receipt`` and ``engines`` find a module by its name by `submodule`.
``training.state`` (what is saved) and ``training.ranks`` (which wrapper averages gradients) go inwards by `inner_key`.
``module_hooks`` and ``targets`` ask `WRAPPER_KEYS` whether they have to look at all, ``everywhere`` `is_wrapper_type`.

A new wrapper needs a row of `_INNER`, a line in ``WRAPS`` of tests/sites/test_wrappers.py, and its name in
docs/behaviour.md ("Wrapped models"). A tuner of PEFT that may call the ``forward`` of what it wraps needs its key in
`_TUNED`. A wrapper that adds no state of its own needs its class name in ``_AROUND`` of ``training.state``; one that
shards the model has to be known in ``_is_parallel`` of ``training.ranks``, and one that averages its gradients in
``averaging_model`` there too.

    >>> [(name, type(module).__name__) for name, module, *_ in walk(nn.DataParallel(nn.Sequential(nn.ReLU())))]
    [('', 'DataParallel'), ('', 'Sequential'), ('0', 'ReLU')]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import nn

# By package and class name, so that nothing is imported that the user has not imported; files inside the packages
# move between versions, these names do not.
_INNER: Final = {
    ("torch", "OptimizedModule"): "_orig_mod",
    ("torch", "DistributedDataParallel"): "module",
    ("torch", "DataParallel"): "module",
    ("torch", "FullyShardedDataParallel"): "_fsdp_wrapped_module",  # FSDP2 wraps nothing: it changes the class
    ("torch", "ActivationWrapper"): "_checkpoint_wrapped_module",  # base of CheckpointWrapper and OffloadWrapper
    ("torch", "AveragedModel"): "module",
    ("peft", "PeftModel"): "base_model",
    ("peft", "PeftMixedModel"): "base_model",
    ("peft", "XLoraModel"): "lora_model",
    ("peft", "BaseTuner"): "model",
    ("peft", "AdaptionPromptModel"): "model",
}
WRAPPER_KEYS: Final = frozenset(_INNER.values())
"""A module without a child of such a name is no wrapper: most are recognised by that alone, for 0.1 µs."""
_TUNED: Final = ("model", "lora_model")
"""The keys of PEFT's tuners, which may call the ``forward`` of what they wrap."""


def inner_key(module: nn.Module) -> str | None:
    """Return the key under which a wrapper keeps the module it wraps; None for a module that is no wrapper."""
    if WRAPPER_KEYS.isdisjoint(module._modules.keys()):
        return None
    key = _key_of_type(type(module))
    return key if key is not None and module._modules.get(key) is not None else None


def is_wrapper_type(cls: Any) -> bool:
    """Return whether ``cls`` is the type of a wrapper, or derived from one."""
    return isinstance(cls, type) and _key_of_type(cls) is not None


def _key_of_type(cls: type) -> str | None:
    for base in cls.__mro__:
        key = _INNER.get((base.__module__.partition(".")[0], base.__name__))
        if key is not None:
            return key
    return None


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers; the module itself if it is none.

    A tuner of PEFT may call ``self.model.forward(...)`` (AdaLoRA does; in older versions all did): hooks on that model
    do not see such a call. Then the tuner is returned in its place, unless the PEFT model around it calls the model.
    """
    key, called = inner_key(module), True
    while key is not None:
        uses = _names_in_forward(module)
        if called and key in _TUNED and "forward" in uses:
            break
        called = "get_base_model" not in uses
        inner = module._modules[key]
        assert inner is not None
        module, key = inner, inner_key(inner)
    return module


def _names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """Return the attributes and globals that the code of a module's ``forward`` names."""
    code = getattr(type(module).forward, "__code__", None)
    names: tuple[str, ...] = () if code is None else code.co_names
    return names


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Return every name of every module, wrappers included, parents first; shared modules appear under each of their
    names. With each comes, for a wrapper, the key of what it wraps.

    A wrapper and what it wraps have one name. torch's own ``named_modules`` gives a shared module one name only, so
    half the names a user can write would select nothing; with its duplicates kept it does not end on a module that
    contains itself.
    """
    # Each item carries the ids of its parents, so that a cycle is seen where it closes.
    stack: list[tuple[str, nn.Module, tuple[int, ...]]] = [("", model, ())]
    while stack:
        name, module, above = stack.pop()
        children = module._modules
        inner = inner_key(module) if children else None
        within = (*above, id(module))
        yield name, module, inner
        for key, child in reversed(children.items()):
            if child is not None and id(child) not in within:
                stack.append((name if key == inner else f"{name}.{key}" if name else key, child, within))


def clean_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return every module that is no wrapper, once, under its first name."""
    seen: set[int] = set()
    for name, module, inner in walk(model):
        if inner is None and id(module) not in seen:
            seen.add(id(module))
            yield name, module


def submodule(model: nn.Module, name: str) -> nn.Module:
    """Return the module of a clean name, inside its wrappers; AttributeError if there is none."""
    layers = list(_layers(model))
    for part in name.split(".") if name else ():
        found = (layer._modules[part] for layer in reversed(layers) if part in layer._modules)
        child = next(found, None)
        if child is None:
            raise AttributeError(f"{type(layers[-1]).__name__} has no module {part!r}")
        layers = list(_layers(child))
    return layers[-1]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Return the module, then what it wraps, and so on inwards."""
    yield module
    key = inner_key(module)
    if key is not None:
        inner = module._modules[key]
        assert inner is not None
        yield from _layers(inner)
