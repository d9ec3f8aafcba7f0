"""Report what became of an attachment: matched, attached, fired how often, last when; and why a hook never fired.

``handle.report()`` and ``handle.remove()`` call this; it reads the entries of an `Attachment`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import re
import tokenize
import warnings
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.errors import HookNeverFired, help_line
from hookline.messages import caller_stacklevel
from hookline.sites import _torch
from hookline.sites.compiled import recompile_guard
from hookline.sites.kinds import FUNCTION, MODULE, Kind
from hookline.sites.wrappers import submodule
from hookline.tables import ShownAsTable, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hookline.sites.hook_at_site import Attachment, ForwardCounter, HookAtSite

NOT_CALLED: Final = -2
"""Stands in for the step at which a hook was attached if it had its chance though no forward of a model began."""

_MAX_SITES: Final = 60
"""How many sites a receipt shows."""
_FEW: Final = 8
"""Parameters that are looked at."""
_WRITES: Final = 3
"""As often a parameter is written to by training, and not by loading a state."""
# Modules whose forward is never called; their children's are.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_UNCALLED: Final = "nothing called it, or the call ended before the hook's turn"
_WHICH_RUN: Final = (
    "To see which modules a forward calls: with hookline.capture(model, '*') as cache: model(x), then "
    "print(cache.names)."
)
_NO_FORWARD: Final = "init|reset|tie_"
"""What is in the names of methods that make weights ready."""


@dataclass(frozen=True, slots=True)
class SiteReceipt:
    """The firings of a hook at one site."""

    name: str
    """Dotted name of the module, parameter or function; what else it is, in words."""
    fired: int
    """How often the hook ran here."""
    last_step: int | None
    """The forward of the model in which it last ran; None if it never did, or there is no model."""
    cost_us: float | None
    """Microseconds per firing, with ``profile=True``."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The firings of an attachment so far.

    Recipe: ``print(handle.report())``, or ``handle.report().fired`` in a test.
    """

    name: str
    """The hook's name."""
    kind: str
    """The kind of hook."""
    matched: int
    """How many modules, functions, … the target selected."""
    attached: int
    """How many of them still carry the hook: all, until it is removed or a module dies."""
    fired: int
    """How often the hook ran, on all of them together."""
    last_step: int | None
    """The forward of the model in which it last ran, counted from 0; None if it never did, or there is no model."""
    cost_us: float | None
    """Microseconds per firing, with ``profile=True``; None without."""
    sites: tuple[SiteReceipt, ...]
    """The same, site by site."""

    @property
    def silent(self) -> tuple[str, ...]:
        """Names of the sites where the hook has not run yet."""
        return tuple(site.name for site in self.sites if not site.fired)

    def __str__(self) -> str:
        last = f", last at step {self.last_step}" if self.last_step is not None else "" if self.fired else ", never"
        cost = "" if self.cost_us is None else f", {self.cost_us:.1f} µs each"
        return (
            f"{self.name} ({self.kind}): matched {self.matched}, attached {self.attached}, "
            f"fired {self.fired}{last}{cost}"
        )

    def __repr__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        """Return the sites in rows, under what all of them did; of a single site, that says all."""
        if len(self.sites) == 1:
            return Table(title=f"{self}, on {self.sites[0].name!r}")
        rows = [
            (site.name or "(the model)", f"{site.fired:,}", _or_dash(site.last_step), _or_dash(site.cost_us, ".1f"))
            for site in self.sites
        ]
        header, rest = ("site", "fired", "last step", "µs each"), " more; all of them are in .sites"
        return Table(header, rows, numbers=(1, 2, 3), title=str(self), most=_MAX_SITES, rest=rest)


class Receipts(ShownAsTable, tuple[Receipt, ...]):
    """The receipts of several attachments; a tuple that prints as a table.

    Recipe: ``handles.report()`` at the end of a cell; ``for receipt in handles.report(): ...``.
    """

    __slots__ = ()

    def _table(self) -> Table:
        rows = [
            (r.name, r.kind, f"{r.matched:,}", f"{r.attached:,}", f"{r.fired:,}", _or_dash(r.last_step)) for r in self
        ]
        header = ("hook", "kind", "matched", "attached", "fired", "last step")
        return Table(header, rows, numbers=(2, 3, 4, 5)) if rows else Table(title="no hooks")

    def __str__(self) -> str:
        return self._table().text()


def _or_dash(value: float | None, form: str = "") -> str:
    return "–" if value is None else format(value, form)


def receipt_of(attachment: Attachment) -> Receipt:
    """Return the receipt as it stands now."""
    entries = attachment.members()
    sites = tuple(_site_receipt(entry) for entry in entries)
    fired = sum(site.fired for site in sites) + attachment.retired
    steps = [site.last_step for site in sites if site.last_step is not None]
    seconds = sum(entry.seconds for entry in entries)
    alive = [entry for entry in entries if entry.container.alive()]
    return Receipt(
        name=attachment.name,
        kind=attachment.kind.value,
        matched=len(sites),
        attached=0 if attachment.removed else len(alive),
        fired=fired,
        last_step=max(steps) if steps else None,
        cost_us=seconds / fired * 1e6 if attachment.options.profile and fired else None,
        sites=sites,
    )


TIMES_FIRED: Final = operator.attrgetter("fired")


def warn_if_never_fired(attachment: Attachment) -> None:
    """Warn once of the sites where the hook never ran, though the model did, with the likely cause."""
    if all(map(TIMES_FIRED, attachment.members())):
        return
    silent = _silent(attachment)
    if not silent or _torch.in_run():  # while the model runs, there is no telling yet
        return
    causes: dict[str, list[str]] = defaultdict(list)
    for entry in silent:
        cause = likely_cause(entry, attachment) if attachment.site_type is MODULE else entry.container.why_silent(entry)
        causes[cause].append(entry.name)
    reasons = "; ".join(f"{_listed(names)}: {cause}" for cause, names in causes.items())
    model_ran = any(entry.step_at_attach != NOT_CALLED for entry in silent)
    among = len(attachment.entries)
    where = f" on {len(silent)} of {among} {attachment.site_type.noun}s" if among > 1 else ""
    warnings.warn(
        f"{attachment.kind.value} hook {attachment.name!r} never fired{where}"
        f"{', although the model ran' if model_ran else ''}. "
        f"{reasons}.{f' {_WHICH_RUN}' if _UNCALLED in causes else ''}\n{help_line(HookNeverFired)}",
        HookNeverFired,
        stacklevel=caller_stacklevel(),
    )


def _silent(attachment: Attachment) -> list[HookAtSite]:
    """Return the entries that had a chance to fire and did not."""
    kind = attachment.kind
    if kind.is_state or kind.is_registration or kind is Kind.PARAM_GRAD:
        return []  # it is not known when these are due
    entries = attachment.members()
    silent = [entry for entry in entries if not entry.fired and entry.counter.step > entry.step_at_attach]
    if not silent and _has_trained_uncalled(attachment, entries):
        return entries
    if attachment.everywhere and attachment.site_type is MODULE:
        silent = [
            entry
            for entry in silent
            if not isinstance(_parent_in(entry.counter.model(), entry.name)[0], nn.MultiheadAttention)
        ]
    if len(silent) == len(entries):
        return silent
    if attachment.site_type is FUNCTION:
        return []  # of all the functions that a glob matches, a model uses a few
    # In a glob over everything, containers come along, which are not meant. Nor, with ``attach_everywhere``, the
    # ``out_proj`` of an attention, which is never called: its weights are read.
    return [entry for entry in silent if not isinstance(entry.container.module(), _CONTAINERS)]


def parameter_versions(model: nn.Module) -> list[tuple[object, int]]:
    """Return gradients and versions of a few parameters, to compare later: training changes them."""
    some = itertools.islice((p for p in model.parameters() if p.requires_grad and not is_lazy(p)), _FEW)
    return [(None if p.grad is None else (id(p.grad), _version(p.grad)), _version(p)) for p in some]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _has_trained_uncalled(attachment: Attachment, entries: list[HookAtSite]) -> bool:
    """Return whether a hook on the model itself never fired, and the model was trained meanwhile."""
    if len(entries) != 1 or attachment.versions_before is None or attachment.context is not None or entries[0].fired:
        return False
    model = entries[0].container.module()
    pairs = zip(attachment.versions_before, [] if model is None else parameter_versions(model), strict=False)
    # Some trainers leave no gradients behind (Lightning); loading a state writes once, an optimizer at each step.
    return any(now[0] not in (None, before[0]) or now[1] - before[1] >= _WRITES for before, now in pairs)


def _site_receipt(entry: HookAtSite) -> SiteReceipt:
    profiled = entry.attachment.options.profile and entry.fired
    turns = entry.attachment.turns
    fired, last_step = (entry.fired, entry.last_step) if turns is None else turns.get(entry.name, (0, -1))
    return SiteReceipt(
        name=entry.name,
        fired=fired,
        last_step=last_step if fired and last_step >= 0 else None,
        cost_us=entry.seconds / entry.fired * 1e6 if profiled else None,
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def likely_cause(entry: HookAtSite, attachment: Attachment) -> str:
    """Return why a hook has not run on its module, as far as can be told."""
    module = entry.container.module()
    if module is None:
        return "the module is gone"
    if is_container(module):
        return "a container is never called; hook its children"
    if attachment.kind.is_gradient and entry.container.calls_seen:
        return _cause_without_backward(entry.counter)
    if attachment.context is not None:
        return "no call was made in the context that attached it (scope='context'), though others may have made some"
    if not entry.name and (entry.counter.stand_in is not None or entry.counter.step == entry.step_at_attach):
        return (
            "the model's own forward was never called, only parts of it (as training_step() and other methods do); "
            "hook the modules that are called"
        )
    cause = cause_around(entry.counter.model(), entry.name, module)
    if cause is not None:
        return cause
    if attachment.kind is Kind.FULL_BACKWARD:
        return "it was not called, or no backward pass came through it; on='backward' sees more"
    return _UNCALLED


def _cause_without_backward(counter: ForwardCounter) -> str:
    """Return why no gradient came to a module that ran: there was no graph, or nobody went back through it."""
    model = counter.model()
    if counter.here.step >= 0 and not counter.here.gradients:
        return "it ran, but without gradients (torch.no_grad, torch.inference_mode): run the model with them"
    if model is not None and not any(parameter.requires_grad for parameter in model.parameters()):
        return (
            "it ran, but no parameter of the model requires gradients, so there is no graph: call requires_grad_() on "
            "the model, or on an input of real numbers (inputs_embeds)"
        )
    return (
        "it ran, but no backward pass came through its outputs before it came off: call backward() inside of the with "
        "block; an output that depends on nothing with requires_grad has no graph"
    )


def cause_around(model: nn.Module | None, name: str, module: nn.Module) -> str | None:
    """Return why ``module``, ``name`` in ``model``, does not call its hooks, as far as the modules around it tell; None
    if they do not.
    """
    if is_container(module):
        return "a container is never called; hook its children"
    parent, child = _parent_in(model, name)
    cause = _cause_in_parent(parent, child) if parent is not None else None
    if cause is not None:
        return cause
    compiled = _compiled_without_guards(model, name, module)
    if compiled is None:
        return None
    return (
        f"{compiled} runs compiled code that was made without guards (guard_filter_fn=, as vLLM has it), and so "
        "never notices a hook that comes after it; attach before its first call, call torch.compiler.reset() "
        "once the hook is on, or run it eagerly (torch.compiler.set_stance('force_eager')); in vLLM, attach it by "
        "hookline.engines.vllm, which runs the steps with hooks eagerly"
    )


def is_container(module: nn.Module) -> bool:
    """Return whether the module only holds others; a list with a forward of its own (parametrizations) is called."""
    return isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward


def calls_child(model: nn.Module, name: str) -> bool:
    """Return whether the source of the module above ``name`` has a call of it: ``self.name(…)``."""
    parent, child = _parent_in(model, name)
    cls: Any = type(parent)  # mypy takes the hash of a class for that of its objects
    # Not every class calls it "self"; any name would take F.linear(…) for a call of self.linear.
    first = {"self", *(code.co_varnames[0] for code in (one.__code__ for one in _methods_of(cls)) if code.co_argcount)}
    called = rf"\b({'|'.join(map(re.escape, sorted(first)))})\.{re.escape(child)}(\[[^\]]*\])?\("
    return parent is not None and re.search(called, _source_of(cls)) is not None


def _compiled_without_guards(model: nn.Module | None, path: str, module: nn.Module) -> str | None:
    """Return which of the modules around ``module``, itself included, has compiled code that checks nothing."""
    around = [model, module] if model is not None else [module]
    while model is not None and "." in path:
        path = path.rpartition(".")[0]
        with suppress(AttributeError):  # cut from the model meanwhile
            around.insert(1, submodule(model, path))
    return next((type(one).__name__ for one in around if one is not None and recompile_guard.ignores_hooks(one)), None)


def _parent_in(model: nn.Module | None, name: str) -> tuple[nn.Module | None, str]:
    """Return the module that would call ``name``, which is no container, and by which attribute."""
    path, _, child = name.rpartition(".")
    if model is None or not name:
        return None, child
    try:
        parent = submodule(model, path)
        while isinstance(parent, _CONTAINERS) and path:
            path, _, child = path.rpartition(".")
            parent = submodule(model, path)
    except AttributeError:  # cut from the model meanwhile
        return None, child
    return parent, child


def _cause_in_parent(parent: nn.Module, child: str) -> str | None:
    """Return what the parent's own code does with the child, read from its source."""
    cls: Any = type(parent)  # mypy takes the hash of a class for that of its objects
    kind = cls.__name__
    if _torch.replays_graph(parent):
        return f"{kind} replays a CUDA graph, which calls no module; hook {kind} itself, or run it without the graph"
    if isinstance(parent, nn.MultiheadAttention):
        return f"{kind} uses its weights in a function and never calls it; hook {kind} itself"
    source = _source_of(cls)
    if re.search(rf"\b{re.escape(child)}(\[[^\]]*\])?\.forward\(", source):
        return f"{kind} calls its .forward() directly, which no hook sees; have it call the module"
    if re.search(rf"\b{re.escape(child)}\.(weight|bias)\b", source):
        return f"{kind} uses its weights in a function and never calls it; hook {kind} itself"
    if isinstance(parent, nn.TransformerEncoderLayer) and not parent.training:
        return f"{kind} took its fused inference path, which calls none of its children"
    return None


# Files are read for it, and models repeat classes.
@functools.lru_cache(maxsize=64)
def _source_of(cls: type) -> str:
    """Return the source of a class's methods, inherited ones too if the forward is.

    Each is read by the line that its code has: by the name of the class, Python finds another one of that name.
    """
    found = []
    for method in _methods_of(cls):
        # Made in a shell; built in; or edited since its import, so that its line is now in the middle of something.
        with suppress(OSError, TypeError, SyntaxError, tokenize.TokenError):
            found.append(inspect.getsource(method))
    return "\n".join(found)


def _methods_of(cls: type) -> list[FunctionType]:
    """Return the methods that a forward may call: those of the class, and of its bases down to where its forward is.

    What only makes weights ready (``__init__``, ``reset_parameters``, ``tie_weights``) reads them, and is no use.
    """
    own: dict[str, Any] = {}
    for base in cls.__mro__:
        own = {**vars(base), **own}
        if "forward" in own:
            break
    return [one for name, one in own.items() if isinstance(one, FunctionType) and not re.search(_NO_FORWARD, name)]
