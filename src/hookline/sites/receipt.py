"""Report what became of an attachment: matched, attached, fired how often, last when; and why a hook never fired.

An `Attachment` is what one call of ``attach``, or of another verb, asked for; its entries are its hooks, one for each
place (head of ``hook_at_site``). All here is read from these; nothing is changed.

A `HookHandle` calls `receipt_of` for ``report()``, and `warn_if_never_fired` for ``remove()``. Others ask why a module
is silent: ``capture`` and ``engines.live_hooks`` by `likely_cause`, ``debug.diagnose`` and ``engines.request_results``
by `cause_around`. ``attach_function`` sets `NOT_CALLED`.

The fields of `Receipt` and `SiteReceipt`, and `Receipt.silent`, are public: users read them, and ``capture`` and
``engines`` do too. Rename or remove none without the steps of docs/versioning.md.

A cause is a guess for the user. A new cause that the modules alone tell is a sentence in `cause_around`, so that all
callers have it; any other one goes into `likely_cause`, or, for hooks on functions, into `_cause_at_function`.
`HandleSet` makes `Receipts`, and handles show the tables of both. Tests: tests/sites/test_receipt.py.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch import nn

from hookline.errors import HookNeverFired, help_line
from hookline.messages import caller_stacklevel, counted, listed
from hookline.sites import _torch
from hookline.sites.compiled import recompile_guard
from hookline.sites.kinds import FUNCTION, GRADIENT_KINDS, MODULE, STATE_KINDS, Kind
from hookline.sites.wrappers import submodule
from hookline.tables import ShownAsTable, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookline.sites.hook_at_site import Attachment, HookAtSite

NOT_CALLED: Final = -2
"""Set by ``attach_function`` as the step at which a hook was attached, if its functions may have been called outside of
any forward: below -1, which is the step before the first forward, so that the hook counts as one that could fire."""

_MAX_SITES: Final = 60
"""How many sites a receipt shows."""
# Modules whose forward is never called; their children's are.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_UNCALLED: Final = (
    "nothing called it, or the call ended before the hook's turn (a parent that calls its .forward(), or uses its "
    "weights in a function, passes hooks by), or code ran that was compiled without guards before the hook came: "
    "attach before its first call, or call torch.compiler.reset()"
)
_NO_BACKWARD: Final = (
    "no backward pass came through its outputs before it came off: run the model with gradients (no torch.no_grad, and "
    "parameters, or an input of real numbers, with requires_grad_()), and call backward() inside of the with block"
)


@dataclass(frozen=True, slots=True)
class SiteReceipt:
    """The firings of a hook at one site."""

    name: str
    """Dotted name of the module, parameter or function; what else it is, in words."""
    fired: int
    """How often the hook ran here."""
    last_step: int | None
    """The forward of the model in which it last ran; None if it never did, or there is no model."""


@dataclass(frozen=True, slots=True, repr=False)
class Receipt(ShownAsTable):
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
    """How many of them carry the hook: all, until it is removed."""
    fired: int
    """How often the hook ran, on all of them together."""
    last_step: int | None
    """The forward of the model in which it last ran, counted from 0; None if it never did, or there is no model."""
    sites: tuple[SiteReceipt, ...]
    """The same, site by site."""

    @property
    def silent(self) -> tuple[str, ...]:
        """Names of the sites where the hook has not run yet."""
        return tuple(site.name for site in self.sites if not site.fired)

    def __str__(self) -> str:
        last = f", last at step {self.last_step}" if self.last_step is not None else ""
        if self.attached < self.matched:
            last += ", removed"
        counts = f"matched {counted(self.matched, 'site')}, fired {counted(self.fired, 'time')}"
        return f"{self.name} ({self.kind}): {counts}{last}"

    def _table(self) -> Table:
        """Return the sites in rows, under what all of them did; of a single site, that says all."""
        if len(self.sites) == 1:
            return Table(title=f"{self}, on {self.sites[0].name!r}")
        rows = [(site.name or "(the model)", f"{site.fired:,}", _or_dash(site.last_step)) for site in self.sites]
        header, rest = ("site", "fired", "last step"), " more; all of them are in .sites"
        return Table(header, rows, numbers=(1, 2), title=str(self), most=_MAX_SITES, rest=rest)


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


def _or_dash(value: int | None) -> str:
    return "–" if value is None else str(value)


def receipt_of(attachment: Attachment) -> Receipt:
    """Return the receipt as it stands now."""
    entries = attachment.members()
    sites = tuple(map(_site_receipt, entries))
    steps = [site.last_step for site in sites if site.last_step is not None]
    # Summed at once: a module may be collected at any time, and its firings are in ``retired`` then.
    fired = sum(site.fired for site in sites) + attachment.retired
    return Receipt(
        name=attachment.name,
        kind=attachment.kind.value,
        matched=len(sites),
        attached=0 if attachment.removed else len(sites),
        fired=fired,
        last_step=max(steps, default=None),
        sites=sites,
    )


def _site_receipt(entry: HookAtSite) -> SiteReceipt:
    turns = entry.attachment.turns
    fired, last_step = (entry.fired, entry.last_step) if turns is None else turns.get(entry.name, (0, -1))
    return SiteReceipt(entry.name, fired, last_step if fired and last_step >= 0 else None)


# -- why a hook never fired ------------------------------------------------------------------------------------------


def warn_if_never_fired(attachment: Attachment) -> None:
    """Warn once of the sites where the hook never ran, though the model did, with the likely cause."""
    silent = _silent(attachment)
    if not silent or _torch.in_run():  # while the model runs, there is no telling yet
        return
    causes: dict[str, list[str]] = defaultdict(list)
    for entry in silent:
        cause = (likely_cause if attachment.site_type is MODULE else _cause_at_function)(entry, attachment)
        causes[cause].append(entry.name)
    reasons = "; ".join(f"{listed(names)}: {cause}" for cause, names in list(causes.items())[:4])
    model_ran = any(entry.step_at_attach != NOT_CALLED for entry in silent)
    among = len(attachment.entries)
    where = f" on {len(silent)} of {among} {attachment.site_type.noun}s" if among > 1 else ""
    warnings.warn(
        f"{attachment.kind.value} hook {attachment.name!r} never fired{where}"
        f"{', although the model ran' if model_ran else ''}. "
        f"{reasons}.\n{help_line(HookNeverFired)}",
        HookNeverFired,
        stacklevel=caller_stacklevel(),
    )


def _silent(attachment: Attachment) -> list[HookAtSite]:
    """Return the entries that could have fired, since a forward has begun, and did not."""
    kind = attachment.kind
    if kind in STATE_KINDS or kind is Kind.PARAM_GRAD:
        return []  # it is not known when these are due
    entries = attachment.members()
    silent = [entry for entry in entries if not entry.fired and entry.counter.step > entry.step_at_attach]
    if len(silent) == len(entries):
        return silent
    if attachment.site_type is FUNCTION or attachment.everywhere:
        return []  # a model uses a few of the functions or modules that match, and nobody expects all of them to fire
    # In a glob over everything, containers come along, which are not meant.
    return [entry for entry in silent if not isinstance(entry.container.module(), _CONTAINERS)]


def likely_cause(entry: HookAtSite, attachment: Attachment) -> str:
    """Return why a hook has not run on its module, as far as can be told."""
    module = entry.container.module()
    if module is None:
        return "the module is gone"
    if attachment.kind in GRADIENT_KINDS and entry.container.calls_seen:
        return f"it ran, but {_NO_BACKWARD}"
    if attachment.context is not None and not is_container(module):
        return "no call was made in the context that attached it (scope='context'), though others may have made some"
    return cause_around(entry.counter.model(), entry.name, module) or _UNCALLED


def _cause_at_function(entry: HookAtSite, attachment: Attachment) -> str:
    if entry.counter.model() is not None and entry.step_at_attach == NOT_CALLED:
        return (
            "the model itself was not called: within= counts what model(x) calls in eager code, and sees neither "
            "model.forward(x) nor calls of a part of the model; give that part as within=, or leave within= out"
        )
    missed = (
        f"it was not called as such: it may be spelt otherwise (target '*.{entry.name.rpartition('.')[2]}' takes all "
        "spellings), be called inside another function of torch, which hides it (hook that one, or the aten operator), "
        "come as another operator (a Linear runs aten.addmm or aten.mm), or run compiled"
    )
    again = "or a reentrant checkpoint repeats its forward where none is seen (use_reentrant=False shows all)"
    return f"{missed}; {_NO_BACKWARD}; {again}" if attachment.kind in GRADIENT_KINDS else missed


def cause_around(model: nn.Module | None, name: str, module: nn.Module) -> str | None:
    """Return why ``module``, ``name`` in ``model``, never calls its hooks, as far as the modules around it tell.

    Return None if they do not.
    """
    if is_container(module):
        return "a container is never called; hook its children"
    modules = list(_modules_around(model, name))
    if name.endswith(".out_proj") and modules and isinstance(modules[-1], nn.MultiheadAttention):
        return "MultiheadAttention uses its weights in a function and never calls it; hook MultiheadAttention itself"
    for each in (*modules, module):
        if each is not module and _torch.replays_graph(each):
            kind = type(each).__name__
            return f"{kind} replays a CUDA graph, which calls no module; hook {kind} itself, or run it without it"
        if recompile_guard.ignores_hooks(each):
            return (
                f"{type(each).__name__} runs code that vLLM has compiled without guards, and so never notices a hook "
                "that comes after it: attach it by hookline.engines.vllm, which runs the steps with hooks eagerly"
            )
    return None


def is_container(module: nn.Module) -> bool:
    """Return whether the module only holds others; a list with a forward of its own (parametrizations) is called."""
    return isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward


def _modules_around(model: nn.Module | None, name: str) -> Iterator[nn.Module]:
    """Return the modules that ``name`` goes through, outermost first, without the last."""
    if model is None or not name:
        return
    parts = name.split(".")
    for depth in range(len(parts)):
        try:
            yield submodule(model, ".".join(parts[:depth]))
        except AttributeError:  # cut from the model meanwhile
            return
