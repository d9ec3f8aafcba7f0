"""Hold the roles that ``find_roles`` finds by structure against what the modules do in a run.

Users call `check_roles` once for a new model. It runs the model a few times with hooks, and changes nothing in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from hookline.errors import Hint, NoMatchError, OptionError
from hookline.observe.capture.capture import capture
from hookline.observe.patch.parts import find_main_input
from hookline.observe.patch.patch import patch
from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.roles import find_roles
from hookline.sites.targets import check_model, select
from hookline.sites.wrappers import submodule
from hookline.tables import ShownAsTable, Table
from hookline.tree import main_tensor, tensors_of

if TYPE_CHECKING:
    from hookline.sites.site_info import Site

__all__ = ["RoleCheck", "check_roles"]

_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")
_ROWS: Final = "batch × tokens"
_FLATTENED: Final = "tokens are flattened to rows; of one prompt, token 5 is index=5, not index=(slice(None), 5)"
_BATCHED: Final = 3
"""Dimensions of what an embedding returns for a batch of sequences."""
_LAST_AXIS: Final = {"unembed": "vocabulary", "router": "experts"}
"""What the last axis counts, where it is not the width of the model."""


def check_roles(model: nn.Module, /, *args: Any, **kwargs: Any) -> RoleCheck:
    """Return which modules are in which role, and whether they behave so in a run of ``model(*args, **kwargs)``.

    Recipe::

        found = hookline.observe.check_roles(model, input_ids=torch.tensor([[5, 6, 7, 8]]))
        print(found)
        assert not found.faults

    The output of each block has to be the input of the next. Attention has to carry a change of the first token to the
    last one of a sequence, an MLP must not; so give it a sequence of several tokens. The embedding has to be called
    with token ids before the first block, the last norm with what the last block returns, the head after the last
    block; with zeros in place of what the head returns, the logits of all tokens have to be the same. A router has to
    return a number for each expert and token. The model runs in evaluation mode, without gradients and uncompiled, one
    time and once more for the head and for each class of attention and MLP; afterwards it is as it was.

    Raises:
        OptionError: (a ValueError) the run had one token.
        NoMatchError: (a KeyError) no roles were found.
    """
    check_model(model)
    names = find_roles(model)
    if not names:
        raise NoMatchError(
            f"No roles were found in this {type(model).__name__}: it has no list of blocks with attention and an MLP "
            "in each. Name modules instead.",
            hint=Hint.LIST_MODULES,
        )
    parts = model.modules()
    is_compiled = any(_torch.is_compiled(each) or _torch.is_compiled_function(each.forward) for each in parts)
    eagerly = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
    with _evaluating(model), eagerly:
        run = _Run(model, names, args, kwargs)
        faults = {role: list(dict.fromkeys([*run.silent(role), *_CHECKS[role](run, run.of(role))])) for role in names}
    shapes, axes = ({role: find(role) for role in names} for find in (run.shape, run.axes))
    return RoleCheck(names, shapes, axes, faults)


@dataclass(frozen=True)
class RoleCheck(ShownAsTable):
    """What `check_roles` has found; prints as a table."""

    names: Mapping[str, list[str]]
    """The modules in each role."""
    shapes: Mapping[str, str]
    """The shape of what the first of them returned."""
    axes: Mapping[str, str]
    """What the axes of that are, by the sizes of the batch: ``"batch, tokens, width"``."""
    by_role: Mapping[str, list[str]]
    """What contradicts a role, in words; an empty list where nothing does."""

    @property
    def faults(self) -> list[str]:
        """Return all that contradicts a role."""
        return [f"{role}: {text}" for role, texts in self.by_role.items() for text in texts]

    @property
    def flattened(self) -> list[str]:
        """Return the roles whose modules get the tokens of all sequences as rows, and return them so."""
        return [role for role, axes in self.axes.items() if axes.startswith(_ROWS)]

    def _table(self) -> Table:
        rows = [
            (
                role,
                ", ".join(_patterns(names)),
                str(len(names)),
                self.shapes[role],
                self.axes[role],
                "; ".join(self.by_role[role]) or "yes",
            )
            for role, names in self.names.items()
        ]
        header = ("role", "modules", "count", "output", "axes", "confirmed by a run")
        foot = [f"{', '.join(self.flattened)}: {_FLATTENED}"] if self.flattened else []
        return Table(header, rows, numbers=(2,), foot=foot)


def _patterns(names: list[str]) -> list[str]:
    return list(dict.fromkeys(_NUMBER.sub("#", name) for name in names))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off; a mode is put back module by module, as they may differ."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in before:
            module.training = mode


class _RoleCall(NamedTuple):
    """One call of a module in a role."""

    name: str
    order: int
    ids: bool
    """Whether it was given whole numbers."""
    input: Tensor | None
    output: Tensor | None


class _Run:
    """Run the model once, and keep the first call of every module that has a role."""

    def __init__(self, model: nn.Module, names: Mapping[str, list[str]], args: Any, kwargs: Any) -> None:
        self._model, self._args, self._kwargs = model, args, kwargs
        self.names = names
        self.calls: dict[str, _RoleCall] = {}
        wanted = [name for some in names.values() for name in some]
        with attach(model, wanted, self._note, observe=True, with_kwargs=True, name="check_roles"):
            model(*args, **kwargs)

    def _note(self, module: nn.Module, args: Any, kwargs: Any, output: Any, *, site: Site) -> None:
        if site.name not in self.calls:
            given = tensors_of((args, kwargs))
            ids = any(not each.is_floating_point() and not each.is_complex() for each in given)
            tensors = _copy(find_main_input(args, kwargs)), _copy(main_tensor(output))
            self.calls[site.name] = _RoleCall(site.name, len(self.calls), ids, *tensors)

    def of(self, role: str) -> list[_RoleCall]:
        """Return the calls of the modules in ``role``."""
        return [self.calls[name] for name in self.names.get(role, []) if name in self.calls]

    def silent(self, role: str) -> Iterator[str]:
        """Yield a fault for each module in ``role`` that was not called."""
        for name in self.names[role]:
            if name not in self.calls:
                yield f"{name!r} was not called"

    def shape(self, role: str) -> str:
        """Return the shape of the first output of ``role``."""
        tensors = [call.output for call in self.of(role) if call.output is not None]
        return str(tuple(tensors[0].shape)) if tensors else "–"

    def axes(self, role: str) -> str:
        """Return what the axes of the first output of ``role`` are, by the sizes that the embedding has returned."""
        called = [call.output for call in (*self.of("embed")[:1], *self.of(role)[:1]) if call.output is not None]
        if len(called) < 2 or called[0].dim() != _BATCHED:
            return "–"
        batch, tokens = called[0].shape[:2]
        leading = tuple(called[1].shape[:-1])
        found = {(batch * tokens,): _ROWS, (tokens, batch): "tokens, batch", (batch, tokens): "batch, tokens"}
        return f"{found[leading]}, {_LAST_AXIS.get(role, 'width')}" if leading in found else "–"

    def one_of_each_class(self, role: str) -> list[str]:
        """Return one module in ``role`` for each class: what one does, the others of its class do."""
        found: dict[type, str] = {}
        for name in self.names[role]:
            if name in self.calls:
                found.setdefault(type(submodule(self._model, name)), name)
        return list(found.values())

    def without(self, name: str) -> Any:
        """Return what the model returns with zeros in place of the output of ``name``."""
        where = select(self._model, name)[0][1]
        with patch(self._model, {where: torch.zeros_like}, scope="context", name="check_roles"):
            return self._model(*self._args, **self._kwargs)

    def reach(self, name: str) -> tuple[bool, bool]:
        """Return whether a change of the first token in the input of ``name`` changes its own output, and the last."""
        before = self.calls[name].output
        assert before is not None
        where = select(self._model, name)[0][1]
        with (
            patch(self._model, {where: _with_other_first}, on="forward_pre", scope="context", name="check_roles"),
            capture(self._model, where, clone=True, stop=True) as cache,
        ):
            self._model(*self._args, **self._kwargs)
        after = main_tensor(next(iter(cache.values())).calls[0].output)
        assert after is not None
        return not torch.equal(_first(before), _first(after)), not torch.equal(_last(before), _last(after))


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _with_other_first(hidden: Tensor) -> Tensor:
    """Return hidden states whose first token is another; not by the same number in all units, which a norm removes."""
    changed = hidden.clone()
    _by_token(changed)[0, ..., ::2] += 1.0
    return changed


def _by_token(tensor: Tensor) -> Tensor:
    """Return a view whose first dimension are the tokens of a sequence: that of (tokens, features), and of most others
    the second; XLNet has (tokens, 1, features).
    """
    return tensor if tensor.dim() == 2 or tensor.shape[1] == 1 else tensor.transpose(0, 1)


def _first(tensor: Tensor) -> Tensor:
    return _by_token(tensor)[0]


def _last(tensor: Tensor) -> Tensor:
    return _by_token(tensor)[-1]


# -- what each role promises -----------------------------------------------------------------------------------------


def _check_resid(run: _Run, calls: list[_RoleCall]) -> Iterator[str]:
    for one, other in pairwise(calls):
        if _NUMBER.sub("#", one.name) != _NUMBER.sub("#", other.name):
            continue  # the last block of an encoder, and the first of its decoder
        if not _is_handed_on(one, other):
            yield f"what {one.name!r} returns is not what {other.name!r} is given"


def _check_part(run: _Run, calls: list[_RoleCall], *, role: str, mixes: bool) -> Iterator[str]:
    widths = {call.output.shape[-1] for call in run.of("resid") if call.output is not None}
    for call in calls:
        if call.output is None or call.output.shape[-1] not in widths:
            yield f"{call.name!r} does not return the width of the residual stream"
            return
    if any(call.output is not None and len(_by_token(call.output)) < 2 for call in calls):
        raise OptionError("check_roles was given one token; give a sequence of several: one has to change another.")
    for name in run.one_of_each_class(role):
        own, last = run.reach(name)
        if not own:
            yield f"the output of {name!r} does not depend on its input"
        elif last is not mixes:
            yield f"{name!r} {'mixes' if last else 'does not mix'} tokens"


def _check_embed(run: _Run, calls: list[_RoleCall]) -> Iterator[str]:
    first = min((call.order for call in run.of("resid")), default=0)
    for call in calls[:1]:
        if not call.ids or call.order > first:
            yield f"{call.name!r} is not given token ids before the first block"


def _check_final_norm(run: _Run, calls: list[_RoleCall]) -> Iterator[str]:
    for call in calls:
        before = [block for block in run.of("resid") if block.order < call.order]
        last = max(before, key=lambda block: block.order, default=None)
        if last is None or not _is_handed_on(last, call):
            yield f"{call.name!r} is not given what the last block returns"


def _is_handed_on(one: _RoleCall, other: _RoleCall) -> bool:
    """Return whether the input of ``other`` is the output of ``one``."""
    return one.output is not None and other.input is not None and torch.equal(one.output, other.input)


def _check_head(run: _Run, calls: list[_RoleCall]) -> Iterator[str]:
    last = max((call.order for call in run.of("resid")), default=0)
    for call in calls:
        if call.order < last:
            yield f"{call.name!r} is called before the last block"
        elif call.output is not None and not _gives_logits(call.output, run.without(call.name)):
            yield f"{call.name!r} does not return the logits, or only a part of them"


def _gives_logits(head: Tensor, output: Any) -> bool:
    """Return whether the logits in an output, of which those of the head were zeros, are the same for all tokens."""
    found = [tensor for tensor in tensors_of(output) if tensor.dim() >= 2]
    rows = [each.flatten(0, -2) for each in found if each.is_floating_point() and each.shape[-1] == head.shape[-1]]
    return not rows or any(torch.equal(each, each[:1].expand_as(each)) for each in rows)


def _check_router(run: _Run, calls: list[_RoleCall]) -> Iterator[str]:
    for call in calls:
        if (
            call.output is None
            or call.input is None
            or call.output.numel() // call.output.shape[-1] != (call.input.numel() // call.input.shape[-1])
        ):
            yield f"{call.name!r} does not return a row for each token"


_CHECKS: Final[Mapping[str, Callable[..., Iterator[str]]]] = {
    "resid": _check_resid,
    "attn": partial(_check_part, role="attn", mixes=True),
    "mlp": partial(_check_part, role="mlp", mixes=False),
    "embed": _check_embed,
    "final_norm": _check_final_norm,
    "unembed": _check_head,
    "router": _check_router,
}
