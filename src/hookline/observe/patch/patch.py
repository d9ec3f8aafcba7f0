"""Edit activations for as long as a block lasts.

Users call `patch` with a mapping from targets to edits or functions. It binds each edit to its sites, and attaches them
as hooks by `hookline.sites`, all or none: if one cannot be attached, those before it are removed again. The hooks
`_EditOutput` and `_EditInput` are also traced by the compiler, and become part of the graph: no code in their
``__call__``, nor in edits.py below it, may read a number of a tensor. What an edit computes belongs in edits.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from hookline.error_policy import warn_user
from hookline.errors import KindError, OptionError, TargetError
from hookline.messages import counted, type_name
from hookline.observe.patch.edits import (
    Edit,
    EditedPlace,
    EditIndex,
    as_edit,
    main_input,
    main_output,
    rebuilt,
    site_text,
)
from hookline.sites.attach import attach_to_modules, new_attachment
from hookline.sites.handle import HandleSet
from hookline.sites.hook_at_site import AttachOptions
from hookline.sites.kinds import Kind
from hookline.sites.roles import Layers, with_role
from hookline.sites.signature import HookTraits
from hookline.sites.targets import check_model, choose

if TYPE_CHECKING:
    from torch import nn

    from hookline.hook_types import Scope, Target
    from hookline.observe.patch.edits import IndexLike
    from hookline.sites.site_info import Site

_FORWARD: Final = Kind.FORWARD
# The letters are those of ``Attachment.reads``: a (arguments), k (keyword arguments), o (output).
_READS_OUTPUT: Final = HookTraits(wants_site=True, may_edit=True, reads="o")
_READS_INPUTS: Final = HookTraits(wants_site=True, may_edit=True, reads="ak")
"""A compiled call gives a hook nothing that is not in the letters of ``reads``."""


def patch(
    model: nn.Module,
    edits: Mapping[Any, Edit | Callable[..., Tensor]] | Edit | Callable[..., Tensor],
    *,
    role: str | None = None,
    layer: Layers = None,
    on: str | Kind | None = None,
    index: IndexLike | None = None,
    exclude: Target = None,
    strict: bool = True,
    scope: Scope = "process",
    name: str | None = None,
) -> Patch:
    """Edit what flows through a model.

    Recipe::

        with hookline.patch(
            model, {"layers.3": hookline.edits.ablate(), "layers.5": hookline.edits.steer(vector, 2.0)}
        ):
            model(x)
        with hookline.patch(model, {"layers.#.mlp": lambda activation: activation * 0.5}):
            model(x)

    An edit changes the main tensor of an output: the tensor itself, or the first of real numbers in a tuple, dict or
    ModelOutput, which is copied around the new one. A function is given that tensor, or the part that ``index`` says,
    and returns another of the same shape, or that one; where it declares a keyword-only ``site``, it gets one. What it
    returns goes on through the model, which may change it in place: of a tensor that you keep, return a clone. A module
    (an adapter, an autoencoder) will do as well. Edits of one site are made in the order in which they were attached,
    within a patch in that of the mapping; captures and observers see what comes out of all of them. Gradients flow
    through edits.

    In compiled code an edit is part of the graph, also with ``fullgraph=True``: another vector, factor, value or
    position (a number, or a list of places) needs no graph of its own; another slice or site does (torch makes eight
    for one function, then it stops: raise ``torch._dynamo.config.recompile_limit`` for a sweep over more). With
    ``scope="process"`` every call of the model is edited, whoever makes it; ``"context"``, the calls of this thread or
    task alone, is an error in compiled code, which does not know whose call it is. Activation checkpointing runs parts
    of the model again in the backward pass, which then belongs inside the block too.

    Args:
        model: The model; names are relative to it.
        edits: What to do where: for each target, as ``attach`` takes it (a name, a glob such as ``"layers.#.mlp"``, a
            type, a module), an edit or a function. With ``role``, that edit or function alone.
        role: The role of the modules in a language model, for one edit: ``patch(model, ablate(), role="attn")`` means
            ``{"role:attn": ablate()}``.
        layer: With ``role``, the number of a block, several, or a slice; -1 is the last.
        on: ``"forward"``, if left out, edits outputs, ``"forward_pre"`` inputs: the main tensor of the positional
            arguments, else ``hidden_states``, else that of the keyword arguments.
        index: The part of the activation to edit, as between the brackets of a tensor (``(slice(None), -1)`` is the
            last position), for edits that have none of their own. The rest stays as it is.
        exclude: Modules to leave out.
        strict: Raise if a target matches nothing; with False, warn, and do the others.
        scope: ``"context"``: edit the calls that this thread, or asyncio task, makes, whoever else runs the model.
        name: A name for reports; that of each edit by default.

    Raises:
        NoMatchError: (a KeyError) a target matches no module, or a site is not in the cache; with the nearest names.
        HookReturnError: (a RuntimeError) in the call: a shape does not fit, or there is no tensor to edit.
        HookSignatureError, OptionError, TargetError, KindError: before anything is attached.
    """
    check_model(model, edits)
    kind = _FORWARD if on is None else Kind.parse(on)
    if kind not in (_FORWARD, Kind.FORWARD_PRE):
        raise KindError(f"patch() edits outputs (on='forward') or inputs (on='forward_pre'), not {str(on)!r}.")
    if role is not None or layer is not None:
        edits = _for_role(edits, role, layer)
    if type(edits) is not dict and not isinstance(edits, Mapping):
        takes = "a mapping, such as {'layers.3': ablate()}, or one edit with role="
        raise OptionError(f"patch() takes {takes}, got {type_name(edits)}.")
    if not edits:
        raise TargetError("patch() was given no edits: write what to do where, {'layers.3': ablate()}.")
    if scope not in ("process", "context"):
        raise OptionError(f"scope= is 'process' or 'context', got {scope!r}.")
    part, placed, inputs = None if index is None else EditIndex(index), [], kind is not _FORWARD
    wanted = {target: as_edit(given, target) for target, given in edits.items()}
    for target, edit in wanted.items():
        chosen = choose(model, target, exclude, strict=strict)
        if chosen:
            whole = edit if edit.index is not None else dataclasses.replace(edit, index=part)
            placed.append((whole, chosen, whole.bound(model, chosen, inputs=inputs)))
    found = Patch()
    try:
        for edit, chosen, bound in placed:
            # Stands for the hooks while they are attached; then each module gets the edit that is bound to it.
            hook = _EditInput(edit) if inputs else _EditOutput(edit)
            options = AttachOptions(with_kwargs=inputs, name=name or edit.word, scope=scope)
            request = new_attachment(hook, kind, options, traits=_READS_INPUTS if inputs else _READS_OUTPUT)
            found.add(attach_to_modules(request, model, chosen))
            found.edits.append(edit)
            for entry in request.entries:
                if inputs or edit.wants_site or request.context is not None:
                    entry.hook = type(hook)(bound[entry.name])
                else:  # without a site, which takes longer to make than the rest of the call
                    entry.hook = _EditOutput(bound[entry.name], EditedPlace(entry.name, kind))
                    entry.simple = True
    except BaseException:
        found.remove(quiet=True)
        raise
    return found


class Patch(HandleSet):
    """The edits of one ``patch``, one handle for each target.

    Recipe: ``with hookline.patch(model, edits) as patched: ...``, or ``patched.remove()``; ``patched.report()`` says
    how often each was made, and where.
    """

    def __init__(self) -> None:
        super().__init__()
        self.edits: list[Edit] = []
        """The edits that the handles put on, in their order; empty after ``remove()``."""

    def remove(self, *, quiet: bool = False) -> None:
        """Take the edits off; warn, unless ``quiet``, of one that was never made, or that selected nothing."""
        edits, self.edits = self.edits, []
        super().remove(quiet=quiet)
        for edit in edits if not quiet else ():
            if edit.index is not None and edit.index.calls and not edit.index.selects:
                warn_user(_empty(edit.index))


def _for_role(edits: Any, role: str | None, layer: Layers) -> dict[str, Any]:
    """Return the mapping that means one edit for a role."""
    found = with_role(None, role, layer=layer)
    targets = found if isinstance(found, list) else [found]
    if isinstance(edits, Mapping):
        raise TargetError(
            f"role={role!r} goes with one edit, patch(model, ablate(), role={role!r}); as a key: {targets[0]!r}."
        )
    return dict.fromkeys(targets, edits)


def _empty(index: EditIndex) -> str:
    return (
        f"index={index.text} selected nothing in {counted(index.calls, 'call')}, so the edit changed nothing. In "
        "generate() with a key-value cache the forward of a new token has one position; a function that declares site= "
        "can distinguish the forwards by site.step (0 is the prompt)."
    )


class _EditOutput:
    """The forward hook of an edit."""

    def __init__(self, edit: Edit, place: EditedPlace | None = None) -> None:
        self.edit = edit
        self.place = place
        """Where it is, for a hook that is called without a site."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any, *, site: Site | None = None) -> Any:
        """Return the output with the edited tensor."""
        where = self.place if site is None else site
        assert where is not None
        if isinstance(output, Tensor):
            return self.edit.apply(output, where)
        main = main_output(output, site_text(where))
        return rebuilt(output, main, self.edit.apply(main, where), site_text(where))


class _EditInput:
    """The forward pre-hook of an edit."""

    def __init__(self, edit: Edit) -> None:
        self.edit = edit

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, site: Site) -> Any:
        """Return the arguments with the edited tensor."""
        where = site_text(site)
        main = main_input(args, kwargs, where)
        new = self.edit.apply(main, site)
        return rebuilt(args, main, new, where), rebuilt(kwargs, main, new, where)
