"""Define the kinds of hook, the types of site that carry each, and the options that each takes.

A `Kind` is the moment at which a hook fires. A `SiteType` is what a hook is put on: the same kind means the same moment
on a module and on a function, with other arguments. The verbs, ``specs.hook_spec`` and ``patch`` parse their ``on=`` by
`Kind.parse`. ``attach.new_attachment`` checks options by `KINDS_OF_OPTION`, and ``signature`` the arguments of a hook
by `SiteType.args`. ``module_hooks``, ``receipt``, ``everywhere``, ``attach_function``, ``attach`` and
``specs.hook_spec`` go by the sets at the end.

The values are public: users write them, also in files of specs. Those of optimizers are parts of names of torch as
well (``register_step_pre_hook``: ``optimizers``, ``_torch.optimizer_hooks``).

A new kind is a member of `Kind`, with its arguments in a `SiteType`, and in each set at the end where it belongs. What
else it needs:

- Always: a line in ``_KINDS`` of tests/helpers_sites.py, NAMES and TAKES of tests/sites/test_kinds.py for a kind of
  modules, the table of kinds in docs/tour.md, the table of torch's hooks in docs/sources.md, ``on:`` in the docstring
  of its verb, an alias in ``hook_types`` if its arguments are like no other's.
- On modules: if torch keeps a dictionary for it, a row of ``module_hooks._KIND_ROWS``, and that dictionary in
  ``_torch.HOOK_DICTS``. If it is about calls (`CALL_KINDS`), ``ModuleHooks._sync_calls``, ``_CALL_KINDS`` of
  ``debug.diagnose.doctor``, the text in ``attach._check_options``, and, in compiled code, ``compiled.trace_hooks``.
- Elsewhere the verb itself has to know the kind: ``tensors`` (`attach_node` sends each kind but ``node_pre`` to torch's
  ``register_hook``), ``optimizers._edited``, the dictionary in ``everywhere._register_with_torch``, and
  ``attach_function``, which unpacks its kinds in the order of `FUNCTION`.

A new type of site is a `SiteType` in `SITE_TYPES`, a file beside ``tensors`` with its verb, the public name of that
verb (``hookline/__init__.pyi``, tests/test_public_names.py), its hooks in the lists of ``find`` (head there), and a
``Place`` with its line in ``_KINDS`` of tests/helpers_sites.py.

    >>> Kind.parse("forward_post")
    <Kind.FORWARD: 'forward'>
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from hookline.errors import KindError, OptionError
from hookline.messages import close_names


class Kind(StrEnum):
    """The moment at which a hook fires, and the arguments it gets.

    One call of a module, top to bottom, with the hooks of each kind where they fire:

        module(*args)
        │  FORWARD_PRE       (module, args)                        may return new args
        ├─ forward()
        │  FORWARD           (module, args, output)                may return a new output
        └─ output
        output.backward()
        │  BACKWARD_PRE      (module, grad_output)                 may return new gradients
        ├─ the module's own backward
        │  BACKWARD          (module, grad_input, grad_output)     may return new gradients
        └─ on to the producer of the input

    A function (``attach_function``) has the same four kinds, with ``(fn, inputs)``, ``(fn, inputs, outputs)``,
    ``(fn, grad_outputs)`` and ``(fn, grad_inputs, grad_outputs)``; what follows is told
    for modules where they have the kind too.
    """

    FORWARD_PRE = "forward_pre"
    """Before ``forward``: ``(module, args)``; with ``with_kwargs``: ``(module, args, kwargs)``."""
    FORWARD = "forward"
    """After ``forward``: ``(module, args, output)``; with ``with_kwargs``: ``(module, args, kwargs, output)``."""
    BACKWARD_PRE = "backward_pre"
    """When the gradients of the outputs are there: ``(module, grad_output)``."""
    BACKWARD = "backward"
    """When the gradients of inputs and parameters are there too: ``(module, grad_input, grad_output)``."""
    FULL_BACKWARD = "full_backward"
    """torch's own ``register_full_backward_hook``, with torch's own side effects (see docs/sources.md)."""
    STATE_DICT_PRE = "state_dict_pre"
    """Before ``state_dict()`` reads the module: ``(module, prefix, keep_vars)``."""
    STATE_DICT_POST = "state_dict_post"
    """After it: ``(module, state_dict, prefix, local_metadata)``."""
    LOAD_STATE_DICT_PRE = "load_state_dict_pre"
    """Before loading: ``(module, state_dict, prefix, local_metadata, strict, missing, unexpected, errors)``."""
    LOAD_STATE_DICT_POST = "load_state_dict_post"
    """After loading: ``(module, incompatible_keys)``."""
    PARAM_GRAD = "param_grad"
    """When a backward pass has accumulated into a parameter's ``.grad``: ``(parameter)``."""
    REGISTER_MODULE = "register_module"
    """Before a submodule is stored in any module: ``(module, name, submodule)``; may return another."""
    REGISTER_PARAMETER = "register_parameter"
    """Before a parameter is: ``(module, name, parameter)``; may return another."""
    REGISTER_BUFFER = "register_buffer"
    """Before a buffer is: ``(module, name, buffer)``; may return another."""
    STEP_PRE = "step_pre"
    """Before an optimizer's step: ``(optimizer, args, kwargs)``; may return ``(args, kwargs)``."""
    STEP_POST = "step_post"
    """After it: ``(optimizer, args, kwargs)``."""
    GRAD = "grad"
    """When the gradient of a tensor is there: ``(grad)``; may return another."""
    NODE_PRE = "node_pre"
    """Before a graph node runs: ``(grad_outputs)``; may return others."""
    NODE_POST = "node_post"
    """After it: ``(grad_inputs, grad_outputs)``; may return other ``grad_inputs``."""

    __hash__ = str.__hash__  # the hash of an enum is a Python call, at each look into a dictionary of kinds

    @classmethod
    def parse(cls, value: str | Kind, site_type: SiteType | None = None) -> Kind:
        """Return the kind with that name or alias; raise a `KindError` with suggestions if ``site_type`` has none such.

        Without ``site_type``, a module is meant.
        """
        site_type = site_type or MODULE
        text = str(value) if isinstance(value, str) else repr(value)
        if text in _LEGACY and site_type is MODULE:
            raise KindError(
                f"on={text!r} is torch's deprecated backward hook, which reports the gradients of the last "
                "operation instead of the module's; use on='backward'."
            )
        try:
            kind = cls(site_type.aliases.get(text, text))
        except ValueError:
            kind = None
        if kind is None or kind not in site_type.args:
            raise KindError(_no_kind(text, kind, site_type))
        return kind

    def check_option(self, option: str) -> None:
        """Raise an `OptionError` if ``option``, which is switched on, does not go with this kind."""
        kinds = KINDS_OF_OPTION[option]
        if self not in kinds:
            raise OptionError(f"{option}= does not go with on={self.value!r}; it goes with {', '.join(sorted(kinds))}.")


@dataclass(frozen=True, slots=True, eq=False)
class SiteType:
    """One type of site, with the kinds of hook it carries."""

    noun: str
    """What one of them is called in messages."""
    verb: str
    """The public call that puts a hook on it."""
    args: dict[Kind, tuple[str, ...]]
    """Its kinds, each with the names of the positional arguments that a hook of that kind is called with."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other spellings of its kinds."""


def _no_kind(text: str, kind: Kind | None, site_type: SiteType) -> str:
    elsewhere = [other for other in SITE_TYPES if kind in other.args]
    if elsewhere:
        other = elsewhere[0]
        return f"on={text!r} is a kind of {other.noun} hook; put it on with {other.verb}."
    short = {kind: alias for alias, kind in site_type.aliases.items() if kind.endswith(f"_{alias}")}
    kinds = [short.get(kind, str(kind)) for kind in site_type.args]  # as users write them
    near = close_names(text, dict.fromkeys([*kinds, *site_type.aliases]), cutoff=0.5)
    hint = f" Nearest: {', '.join(map(repr, near))}." if near else ""
    return f"No kind {text!r}.{hint} Kinds: {', '.join(kinds)}."


_SAVING: Final = ("module", "state_dict", "prefix", "local_metadata")
_POST_ALIASES: Final = {"forward_post": "forward", "backward_post": "backward"}
MODULE: Final = SiteType(
    "module",
    "attach",
    {
        Kind.FORWARD_PRE: ("module", "args"),
        Kind.FORWARD: ("module", "args", "output"),
        Kind.BACKWARD_PRE: ("module", "grad_output"),
        Kind.BACKWARD: ("module", "grad_input", "grad_output"),
        Kind.FULL_BACKWARD: ("module", "grad_input", "grad_output"),
        Kind.STATE_DICT_PRE: ("module", "prefix", "keep_vars"),
        Kind.STATE_DICT_POST: _SAVING,
        Kind.LOAD_STATE_DICT_PRE: (*_SAVING, "strict", "missing_keys", "unexpected_keys", "error_msgs"),
        Kind.LOAD_STATE_DICT_POST: ("module", "incompatible_keys"),
        Kind.PARAM_GRAD: ("parameter",),
    },
    _POST_ALIASES,
)
FUNCTION: Final = SiteType(
    "function",
    "attach_function",
    {
        Kind.FORWARD_PRE: ("fn", "inputs"),
        Kind.FORWARD: ("fn", "inputs", "outputs"),
        Kind.BACKWARD_PRE: ("fn", "grad_outputs"),
        Kind.BACKWARD: ("fn", "grad_inputs", "grad_outputs"),
    },
    _POST_ALIASES,
)
OPTIMIZER: Final = SiteType(
    "optimizer",
    "attach_optimizer",
    {
        Kind.STEP_PRE: ("optimizer", "args", "kwargs"),
        Kind.STEP_POST: ("optimizer", "args", "kwargs"),
        Kind.STATE_DICT_PRE: ("optimizer",),
        Kind.STATE_DICT_POST: ("optimizer", "state_dict"),
        Kind.LOAD_STATE_DICT_PRE: ("optimizer", "state_dict"),
        Kind.LOAD_STATE_DICT_POST: ("optimizer",),
    },
)
TENSOR: Final = SiteType("tensor", "attach_tensor", {Kind.GRAD: ("grad",), Kind.PARAM_GRAD: ("tensor",)})
NODE: Final = SiteType(
    "graph node",
    "attach_node",
    {Kind.NODE_PRE: ("grad_outputs",), Kind.NODE_POST: ("grad_inputs", "grad_outputs")},
    {"pre": "node_pre", "post": "node_post"},
)
STORED: Final = SiteType(
    "process-wide",
    "attach_everywhere",
    {
        Kind.REGISTER_MODULE: ("module", "name", "submodule"),
        Kind.REGISTER_PARAMETER: ("module", "name", "parameter"),
        Kind.REGISTER_BUFFER: ("module", "name", "buffer"),
    },
)
SITE_TYPES: Final = (MODULE, FUNCTION, OPTIMIZER, TENSOR, NODE, STORED)
"""In the order in which an error looks for one that has a kind."""

GRADIENT_KINDS: Final = (Kind.BACKWARD_PRE, Kind.BACKWARD)
"""The kinds that ``gradients`` fires; not so ``full_backward``, which torch fires. In this order: ``ModuleHooks``
passes their hooks on to ``set_gradient_hooks(pre, post)``."""
CALL_KINDS: Final = (Kind.FORWARD, Kind.FORWARD_PRE, *GRADIENT_KINDS)
"""The kinds that we fire at the calls of a module or in their backward. Only these take ``scope="context"``
(``attach._check_options``); in specs, these and ``param_grad`` take ``every`` (`HookSpec`). ``module_hooks`` runs
them from what it puts around a call."""
STATE_KINDS: Final = frozenset(
    {Kind.STATE_DICT_PRE, Kind.STATE_DICT_POST, Kind.LOAD_STATE_DICT_PRE, Kind.LOAD_STATE_DICT_POST}
)
"""The kinds of saving and loading, which do not fire in a run. For these alone no forwards are counted in compiled code
(``module_hooks.counter_of``), nobody is warned that they never fired (``receipt``), and ``attach_everywhere`` refuses
them on modules."""
_EDITING: Final = frozenset(
    {*CALL_KINDS, Kind.FULL_BACKWARD, *STORED.args, Kind.STEP_PRE, Kind.GRAD, Kind.NODE_PRE, Kind.NODE_POST}
)
"""The kinds whose hooks may return something in place of what they were shown."""
KINDS_OF_OPTION: Final[dict[str, frozenset[Kind]]] = {
    "with_kwargs": frozenset({Kind.FORWARD_PRE, Kind.FORWARD}),
    "always_call": frozenset({Kind.FORWARD}),
    "observe": _EDITING,
}
"""The kinds that take each option that is on or off. Not listed are ``prepend`` and ``name``, which go with all, and
``scope``, for which `CALL_KINDS` decides."""
_LEGACY: Final = ("legacy_backward", "backward_hook", "register_backward_hook")
