"""Rows about hooks that fire, or no longer do: whole forwards and steps, ours against torch's.

Takes a `Subject`, hands `Row`s to ``rows``.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from measure import Row, Trial, added, interleave, ratios, spread, trial, typical
from models import TINY
from subject import Setting, Subject, by_torch, empty, empty_grad, empty_pre, empty_site, is_leaf
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import hookline as hl
from hookline.sites import _torch
from hookline.sites.kinds import MODULE

__all__ = ["backward", "capture", "everywhere", "forward", "removed", "single"]


def removed(setting: Setting) -> Iterator[Row]:
    """A model that carried hooks of all kinds, against copies that never did."""
    for shape in setting.shapes:
        subject = Subject(shape, setting)
        num_copies = 8 if shape is TINY else 1  # where in memory a copy lands matters more than anything else
        copies = [[copy.deepcopy(subject.model) for _ in range(3)] for _ in range(num_copies)]
        for touched, *_ in copies:
            touch(touched, subject)
        for what, call in (("forward", subject.forward), ("forward and backward", subject.step)):
            names = "touched", "fresh", "fresh again"
            trials = [
                over_copies(name, call, column, subject.inner, setting)
                for name, column in zip(names, zip(*copies, strict=True), strict=True)
            ]
            samples = interleave(trials, setting.rounds(160 if shape is TINY else 40))
            yield Row(
                f"all hooks removed, {what}",
                "a model that carried hooks of all kinds, all removed",
                "the same model, never touched",
                f"{shape}; {num_copies} copies in turn",
                spread(ratios(samples, "touched", "fresh")),
                spread(ratios(samples, "fresh again", "fresh")),
                f"{typical(samples, 'touched') * 1e3:.3f} / {typical(samples, 'fresh') * 1e3:.3f} ms",
                like_same=True,
            )


def over_copies(
    name: str, call: Callable[[nn.Module], None], models: tuple[nn.Module, ...], inner: int, setting: Setting
) -> Trial:
    """A trial that takes the next of several copies each time."""
    turns = itertools.cycle(
        [trial(name, lambda model=model: call(model), inner=inner, device=setting.device) for model in models]
    )
    return lambda: next(turns)()


def touch(model: nn.Module, subject: Subject) -> None:
    """Put on hooks of every kind, see all of them fire, take them off."""
    with ExitStack() as hooks:
        for kind in MODULE.args:  # but not where inputs are integers: torch's full backward hook warns there
            hooks.enter_context(hl.attach(model, "?*", lambda *args: None, on=kind, exclude=nn.Embedding))
        hooks.enter_context(hl.attach(model, "*", empty, always_call=True))
        hooks.enter_context(hl.attach(model, "*", empty_grad, on="backward", observe=True))
        hooks.enter_context(hl.attach_everywhere(empty_pre, on="forward_pre"))
        subject.step(model)
        model.load_state_dict(model.state_dict())
    hl.assert_no_hooks(model, foreign=True)


def forward(setting: Setting) -> Iterator[Row]:
    """Twelve empty forward hooks, ours against torch's."""
    for shape in setting.shapes:
        yield from forward_of(Subject(shape, setting), setting)


def forward_of(subject: Subject, setting: Setting) -> Iterator[Row]:
    model = subject.model

    def by_hand() -> AbstractContextManager[object]:
        return by_torch(list(model.h), "register_forward_hook", empty)

    hooked = {
        "bare": nullcontext,
        "torch": by_hand,
        "torch again": by_hand,
        "ours": lambda: hl.attach(model, "h.#", empty),
        "observe": lambda: hl.attach(model, "h.#", empty, observe=True),
    }
    trials = [
        trial(name, subject.forward, inner=subject.inner, hooked=on, device=setting.device)
        for name, on in hooked.items()
    ]
    samples = interleave(trials, setting.rounds(400 if subject.shape is TINY else 40))
    for name, asked in (("ours", ""), ("observe", ", observe=True")):
        yield Row(
            f"twelve empty forward hooks{asked}",
            f'forward with `hl.attach(model, "h.#", hook{asked})`',
            "forward with `register_forward_hook` on the same blocks",
            str(subject.shape),
            spread(ratios(samples, name, "torch")),
            spread(ratios(samples, "torch again", "torch")),
            f"{typical(samples, name) * 1e3:.3f} / {typical(samples, 'torch') * 1e3:.3f} ms "
            f"(bare {typical(samples, 'bare') * 1e3:.3f})",
            at_most=1.03,
        )


def capture(setting: Setting) -> Iterator[Row]:
    """Twelve hooks that stay on and keep the outputs by name."""
    subject = Subject(TINY, setting)
    model = subject.model
    kept: dict[str, object] = {}

    def keep(module, args, output, *, site):
        kept[site.name] = output

    @contextmanager
    def by_hand() -> Iterator[None]:
        with ExitStack() as hooks:
            for index, block in enumerate(model.h):
                name = f"h.{index}"
                hook = lambda module, args, output, name=name: kept.__setitem__(name, output)  # noqa: E731
                hooks.enter_context(block.register_forward_hook(hook))
            yield

    hooked = {
        "bare": nullcontext,
        "torch": by_hand,
        "torch again": by_hand,
        "ours": lambda: hl.attach(model, "h.#", keep, observe=True),
    }
    trials = [
        trial(name, subject.forward, inner=subject.inner, hooked=on, device=setting.device)
        for name, on in hooked.items()
    ]
    samples = interleave(trials, setting.rounds(300))
    yield Row(
        "twelve hooks that keep the output, whole forward",
        'one `hl.attach(model, "h.#", keep, observe=True)`, `keep` taking `site`',
        "twelve hand-written closures through `register_forward_hook`",
        str(TINY),
        spread(ratios(samples, "ours", "torch")),
        spread(ratios(samples, "torch again", "torch")),
        f"{added(samples, 'ours', 'bare') / 12e-6:.2f} / {added(samples, 'torch', 'bare') / 12e-6:.2f} "
        "µs per hook beyond bare",
    )


def everywhere(setting: Setting) -> Iterator[Row]:
    """One empty hook on every module of the process."""
    subject = Subject(TINY, setting)
    model = subject.model
    num_called = sum(not isinstance(module, nn.ModuleList) for module in model.modules())
    hooked = {
        "bare": nullcontext,
        "bare again": nullcontext,
        "torch": lambda: register_module_forward_hook(empty),
        "torch again": lambda: register_module_forward_hook(empty),
        "ours": lambda: hl.attach_everywhere(empty),
    }
    trials = [
        trial(name, subject.forward, inner=subject.inner, hooked=on, device=setting.device)
        for name, on in hooked.items()
    ]
    samples = interleave(trials, setting.rounds(200))
    for other, words in (("torch", "forward under torch's `register_module_forward_hook`"), ("bare", "bare forward")):
        yield Row(
            f"empty process-wide hook, against {other}",
            "forward under `hl.attach_everywhere(hook)`",
            words,
            f"{TINY}; {num_called} modules called",
            spread(ratios(samples, "ours", other)),
            spread(ratios(samples, f"{other} again", other)),
            f"{typical(samples, 'ours') * 1e3:.3f} / {typical(samples, other) * 1e3:.3f} ms; "
            f"{added(samples, 'ours', 'bare') / num_called * 1e6:.2f} µs per module, "
            f"torch {added(samples, 'torch', 'bare') / num_called * 1e6:.2f}",
        )


def single(setting: Setting) -> Iterator[Row]:
    """What one empty hook adds to one call."""
    parent = nn.Sequential(nn.Identity())
    module, x = parent[0], torch.zeros(1)

    def by_hand() -> AbstractContextManager[object]:
        return module.register_forward_hook(empty)

    hooked: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "bare": nullcontext,
        "torch": by_hand,
        "torch again": by_hand,
        "forward": lambda: hl.attach(parent, "0", empty),
        "forward, observe=True": lambda: hl.attach(parent, "0", empty, observe=True),
        "forward, with site": lambda: hl.attach(parent, "0", empty_site),
        "forward, profile=True": lambda: hl.attach(parent, "0", empty, profile=True),
        "forward, always_call=True": lambda: hl.attach(parent, "0", empty, always_call=True),
        "forward_pre": lambda: hl.attach(parent, "0", empty_pre, on="forward_pre"),
    }
    trials = [trial(name, lambda: module(x), inner=10, batch=500, hooked=on) for name, on in hooked.items()]
    samples = interleave(trials, setting.rounds(60))
    same = spread(ratios(samples, "torch again", "torch", beyond="bare"))
    for name in [name for name in hooked if name.startswith("forward")]:
        yield Row(
            f"one empty hook, {name}",
            "what `hl.attach` adds to a call",
            "what an empty `register_forward_hook` adds",
            "one Identity",
            spread(ratios(samples, name, "torch", beyond="bare")),
            same,
            f"{added(samples, name, 'bare') * 1e6:.2f} / {added(samples, 'torch', 'bare') * 1e6:.2f} µs",
        )


def backward(setting: Setting) -> Iterator[Row]:
    """Empty gradient observation against an empty full backward hook, both beyond the bare step."""
    for shape in setting.shapes:
        subject = Subject(shape, setting)
        # The rows "by hand" say where the floor is: two tensor hooks take 0.2 to 0.3 of torch's, but see the sum of all
        # who use the input, and lose an output that is changed in place. A leaf needs an alias for its own share and
        # the tensor behind the output. A block may add no node, so that sums keep their order: its part of the graph is
        # walked, 1.5 µs a node, and two nodes of it get a hook: with two tensor hooks that is 0.7.
        yield from backward_on(subject, "all leaf modules", is_leaf, setting, at_most=0.5)
        if setting.device.type == "cpu":  # beside a step on a GPU, twelve hooks are noise
            yield from backward_on(subject, "the twelve blocks", "h.#", setting, at_most=0.7)


def walk_time(subject: Subject, target: object) -> float:
    """How long the walks of one step take that find the nodes leading to inputs, in seconds."""
    spent, walk = [0.0], _torch.boundary

    def timed(*given: Any) -> Any:
        start = time.thread_time()
        try:
            return walk(*given)
        finally:
            spent[0] += time.thread_time() - start

    with hl.attach(subject.model, target, empty_grad, on="backward"):
        subject.step()
        _torch.boundary = timed
        try:
            for _ in range(5):
                subject.step()
        finally:
            _torch.boundary = walk
    return spent[0] / 5


@contextmanager
def two_tensor_hooks(modules: list[nn.Module], *, own_share: bool = False) -> Iterator[None]:
    """A tensor hook on the output and one on the input of each module, by hand.

    With ``own_share`` the input goes in as an alias, which gets the gradient of this module alone, and the hook of an
    output that is a reshape is on the tensor behind it, where an operation in place does no harm.
    """

    def see(grad: Tensor) -> None: ...

    def before(module: nn.Module, args: tuple[Any, ...]) -> Any:
        alias = args[0].view_as(args[0])
        alias.register_hook(see)
        return (alias,)

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        base, shape = output._base, output.shape
        if not own_share:
            output.register_hook(see)
            args[0].register_hook(see)
        elif base is None or base.grad_fn is None or base.numel() != output.numel():
            output.register_hook(see)
        else:
            base.register_hook(lambda grad: see(grad.view(shape)))

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(after))
            if own_share:
                hooks.enter_context(module.register_forward_pre_hook(before))
        yield


def backward_on(subject: Subject, words: str, target: object, setting: Setting, *, at_most: float) -> Iterator[Row]:
    model = subject.model
    modules = [site.module for site in hl.find(model, target)]

    def by_hand() -> AbstractContextManager[object]:
        return by_torch(modules, "register_full_backward_hook", empty_grad)

    hooked: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "bare": nullcontext,
        "torch": by_hand,
        "torch again": by_hand,
        "a hook that returns nothing": lambda: hl.attach(model, target, empty_grad, on="backward"),
        "observe=True": lambda: hl.attach(
            model, target, lambda module, grad_input, grad_output: None, on="backward", observe=True
        ),
        "a hook that may edit": lambda: hl.attach(
            model, target, lambda module, grad_input, grad_output: grad_input, on="backward"
        ),
        "by hand, two tensor hooks": lambda: two_tensor_hooks(modules),
        "by hand, the module's own share": lambda: two_tensor_hooks(modules, own_share=True),
    }
    trials = [
        trial(name, subject.step, inner=max(subject.inner // 2, 2), hooked=on, device=setting.device)
        for name, on in hooked.items()
    ]
    samples = interleave(trials, setting.rounds(50 if subject.shape is TINY else 20))
    same = spread(ratios(samples, "torch again", "torch", beyond="bare"))
    num = len(modules)
    walk = walk_time(subject, target) / num * 1e6
    ours = 'what `hl.attach(…, on="backward")` adds to a step'
    by_hand_words = {
        "by hand, two tensor hooks": "what `register_hook` on the output and on the input adds; the input's has what "
        "all its users send",
        "by hand, the module's own share": "what `register_hook` on the tensor behind the output and on an alias of "
        "the input adds, which is one node more",
    }
    for name in list(hooked)[3:]:
        yield Row(
            f"empty gradient hook on {words}: {name}",
            by_hand_words.get(name, ours),
            "what `register_full_backward_hook` adds",
            f"{subject.shape}; {num} modules",
            spread(ratios(samples, name, "torch", beyond="bare")),
            same,
            f"{added(samples, name, 'bare') / num * 1e6:.1f} / {added(samples, 'torch', 'bare') / num * 1e6:.1f} "
            f"µs per module (bare step {typical(samples, 'bare') * 1e3:.2f} ms)"
            + ("" if name in by_hand_words else f"; {walk:.1f} µs of it walk the graph"),
            at_most=at_most if name in ("a hook that returns nothing", "observe=True") else None,
        )
