"""The private functions and habits of torch that hookline leans on, gathered in one file.

The heading of each part says which files use it, and where it is tested: by itself in ``tests/sites/test_torch_*.py``,
or only by the behaviour that needs it. A private name of torch that another file needs is put into the part that fits
(for ``torch.distributed``: into ``distributed._torch_distributed``), with the versions it was checked on, the file that
uses it in the heading, and a test that fails when a version of torch changes it. Where nothing else is said, the names
here were checked on torch 2.11 and 2.13. tests/sites/test_torch_optimizers.py fails where another file of the package
imports a private name of torch, or reads one from ``torch`` itself.

Used where they are needed, and not gathered here, are old attributes of objects: for example ``Tensor._base`` and
``_version``, ``Module._modules`` and ``_parameters``, the hook dictionaries of ``Module``, and
``Module._replicate_for_data_parallel`` (``compiled.recompile_guard``).

Some functions count frames above them (`called_by_us`, `backward_hooks_of_call`): one more call between them and torch
breaks them. The string `_WIRING` is the module name of ``sites/gradients.py``: rename both together.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C import _FunctionBase as FunctionBase
from torch._C._autograd import _get_sequence_nr
from torch._compile import _disable_dynamo
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.modules import module as module_py
from torch.nn.utils import stateless
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_py
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FunctionBase", "OpOverload", "TorchDispatchMode"]  # of torch's own, passed on

# -- names of torch: sites.module_hooks, .compiled.recompile_guard, .functions.attach_function (APPLY_IS_PYTHON) ---
# Tested in test_torch_modules.py; APPLY_IS_PYTHON in tests/sites/functions/test_function_classes.py.

APPLY_IS_PYTHON: Final = isinstance(vars(torch.autograd.Function)["apply"], classmethod)
"""Whether ``Function.apply`` looks the C++ one up by ``super()``: torch 2.11 to 2.13. From 2.14 on it is that one."""

CALL_IMPL: Final = "_call_impl"
"""``nn.Module.__call__`` looks this method up on the instance, so an attribute of that name wraps the whole call."""

FULL_BACKWARD_FLAG: Final = "_is_full_backward_hook"
"""torch sets it with the first full backward hook and never takes it back."""

HOOK_DICTS: Final[dict[str, tuple[str, ...]]] = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_backward_pre_hooks": (),
    "_backward_hooks": (),
    "_state_dict_pre_hooks": (),
    "_state_dict_hooks": (),
    "_load_state_dict_pre_hooks": (),
    "_load_state_dict_post_hooks": (),
}
"""The hook dictionaries of a module, each with the dictionaries that hold options for the same ids.

`put_hook`, `drop_hook` and `hooks_of` below read it, and ``module_hooks``, which has a `Row` by the same name for each
dictionary that slots of ours go into (``_CALL_ROWS``, ``_KIND_ROWS``). A new dictionary of torch is a line here:
tests/sites/test_torch_modules.py fails without it. For a `Kind` that goes into it, see the head of ``kinds``.
"""

# -- the graph of autograd: sites, observe.watch, metta, debug.first_bad, debug.compare ----------------------------
# Tested in test_torch_autograd.py, but for graph_task_id, current_node and made_since: by what uses them.

# Nodes that accumulate into a leaf carry the largest 64-bit number, to run as soon as they are ready.
_LEAF_SEQUENCE: Final = 1 << 62
_AccumulateGrad: Final[type] = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

sequence_number: Final[Callable[[], int]] = _get_sequence_nr
"""The number that the next graph node of this thread will get; later nodes have larger ones."""

graph_task_id: Final[Callable[[], int]] = torch._C._current_graph_task_id
"""Which backward pass is running in this thread; -1 for none (0.1 µs)."""


current_node: Final[Callable[[], Any]] = torch._C._current_autograd_node
"""The graph node whose backward runs in this thread; None outside of a backward pass."""

will_execute: Final[Callable[[Any], bool]] = torch._C._will_engine_execute_node
"""Whether the backward pass that is running now comes to that node; refuses leaves in ``autograd.grad()``."""


def sequence_number_of(node: Any) -> int:
    """Return when a graph node was made; autograd runs the ready node with the largest number first."""
    return node._sequence_nr()  # type: ignore[no-any-return]


def made_since(node: Any, number: int) -> bool:
    """Return whether a graph node is younger than that number; none, or a leaf's accumulator, is not."""
    return node is not None and number <= node._sequence_nr() < _LEAF_SEQUENCE


_F = TypeVar("_F", bound=Callable[..., Any])
Edges: TypeAlias = dict[Any, dict[int, int]]
"""Graph edges to watch for: by the node they lead to, by the number of its output, a number that the caller chooses."""


def boundary(roots: list[Any], edges: Edges, since: int) -> list[tuple[Any, list[tuple[int, int]]]]:
    """Return the nodes younger than ``since``, found by walking from ``roots``, that have one of ``edges``.

    Each comes with pairs: the index in its ``next_functions`` (which is that in its ``grad_input``), and the caller's
    number. The walk uses up ``roots``, if that is a list of one. Nodes that accumulate into a leaf lead nowhere and are
    passed over. They are known by their class: they are a third of a block's nodes, and to ask for their number takes
    three times as long.
    """
    found: list[tuple[Any, list[tuple[int, int]]]] = []
    todo = roots if len(roots) == 1 else list(dict.fromkeys(roots))  # several outputs may be one node's
    seen = {None, *edges, *roots}
    for node in todo:  # which grows meanwhile
        nexts, meets = node.next_functions, False
        for target, _ in nexts:
            if target in seen:
                meets = meets or target in edges
            elif type(target) is not _AccumulateGrad and target._sequence_nr() >= since:
                seen.add(target)
                todo.append(target)
        if meets:
            hits = [(slot, edges[to][nr]) for slot, (to, nr) in enumerate(nexts) if to in edges and nr in edges[to]]
            if hits:
                found.append((node, hits))
    return found


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass that is running now has accumulated everything."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# -- hooks of modules and tensors: sites.module_hooks, .find, .gradients, debug.diagnose, serve.row_batch ----------
# Tested in test_torch_modules.py; only_hook in test_torch_autograd.py.


def put_hook(module: nn.Module, attribute: str, hook_id: int, hook: Any, *, with_kwargs: bool = False) -> None:
    """Put a hook under an id of our own into one of the module's dictionaries, in the place of the one that is there.

    What torch's own verbs do, without the handle, which costs more than all the rest together, and changes a class of
    torch's each time. Of load_state_dict pre-hooks torch keeps a wrapper that adds the module.
    """
    hooks: OrderedDict[int, Any] = getattr(module, attribute)
    options = HOOK_DICTS[attribute]
    if with_kwargs and options:  # before another thread's call comes to the hook
        getattr(module, options[0])[hook_id] = True
    if attribute == "_backward_hooks" and hook_id not in hooks:
        handle = module.register_full_backward_hook(hook)  # which refuses some modules
        hooks[hook_id] = hooks.pop(handle.id)
    else:
        is_wrapped = attribute == "_load_state_dict_pre_hooks"
        hooks[hook_id] = module_py._WrappedHook(hook, module) if is_wrapped else hook
    if not with_kwargs and options:
        getattr(module, options[0]).pop(hook_id, None)


def drop_hook(module: nn.Module, attribute: str, hook_id: int) -> None:
    """Take one hook off, with its options."""
    for name in (attribute, *HOOK_DICTS[attribute]):
        getattr(module, name).pop(hook_id, None)


def only_hook(tensor: Tensor, node: Any, kind: Callable[[], _F]) -> _F:
    """Return the one hook of a kind on a tensor that ``node`` made; put it on the first time.

    Its key among the tensor's hooks is the kind. torch keeps these with the node, so that it goes when the graph does,
    and begins with none when the tensor is changed in place.
    """
    hooks: Any = tensor._backward_hooks  # what ``register_hook`` does, without the handle; torch types keys as int
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        node._register_hook_dict(tensor)
    found: _F | None = hooks.get(kind)
    if found is None:
        found = hooks[kind] = kind()
    return found


def hooks_of(module: nn.Module) -> Iterator[tuple[str, int, Any]]:
    """Return every hook in the module's own dictionaries: dictionary, id, callable."""
    for attribute in HOOK_DICTS:
        hooks: OrderedDict[int, Any] = getattr(module, attribute)
        wrapped = attribute == "_load_state_dict_pre_hooks"  # torch keeps these in a wrapper that adds the module
        for hook_id, hook in list(hooks.items()) if hooks else ():
            yield attribute, hook_id, getattr(hook, "hook", hook) if wrapped else hook


# -- the call that is under way, and hooks there: sites, observe, debug.diagnose; tensor_hooks_of: metta too -------
# Tested in test_torch_functions.py (backward_hooks_of_call), test_torch_modules.py (in_run) and test_parameters.py
# (parameter_hooks_of); the rest by what uses it.

IN_MODE: Final = torch.no_grad()(lambda: None).__code__
"""The code of every function in ``@torch.no_grad()`` or the like, which give back what the function does."""


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether torch itself calls backward hooks for the module, its own or global ones."""
    # Looked up at each call: torch's own tests put other dictionaries in the place of the global ones.
    return bool(
        module._backward_hooks
        or module._backward_pre_hooks
        or module_py._global_backward_hooks
        or module_py._global_backward_pre_hooks
    )


def backward_hooks_of_call(depth: int) -> Any:
    """Return the ``BackwardHook`` that torch has made for the module call whose forward hook asks; None if there is
    none.

    It is a variable of the frame that calls that forward hook, ``depth`` calls above this one, and its
    ``user_pre_hooks`` are a list of this call alone (torch 2.11 to 2.13).
    """
    found = sys._getframe(depth).f_locals.get("bw_hook")
    return found if hasattr(found, "user_pre_hooks") else None


def in_transform() -> bool:
    """Return whether a ``torch.func`` transform or forward-mode AD is at work, which custom functions do not bear."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def in_run() -> bool:
    """Return whether a forward or backward is under way in this thread; walks the stack, so not for hot paths."""
    return graph_task_id() != -1 or next(running(), None) is not None


def _frames(top: FrameType | None = None) -> Iterator[FrameType]:
    """Return the frames of this thread, or from ``top`` on, the innermost first."""
    frame: FrameType | None = top or sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def parameter_hooks_of(module: nn.Module) -> Iterator[Any]:
    """Return every post-accumulate hook on the module's own parameters."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield from leaf_hooks_of(parameter)


def tensor_hooks_of(tensor: Tensor) -> list[Any]:
    """Return every hook that ``Tensor.register_hook`` has put on a tensor (checked on torch 2.11 to 2.13)."""
    hooks = getattr(tensor, "_backward_hooks", None)
    return list(hooks.values()) if hooks else []


def global_hooks() -> Iterator[tuple[str, Any]]:
    """Return the hooks that torch runs for every module of the process: dictionary, callable (torch 2.11 to 2.13)."""
    for attribute in ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks"):
        for hook in list(getattr(module_py, f"_global_{attribute}").values()):
            yield attribute, hook


# -- leaves, and FSDP2: sites.parameters, sites.module_hooks, debug.diagnose ---------------------------------------
# Tested in test_torch_compile.py (place); the rest by behaviour, in tests/sites/test_parameters.py, and for FSDP2 in
# test_fsdp_order.py and test_wrappers_distributed.py there.

leaf_hooks: Final = operator.attrgetter("_post_accumulate_grad_hooks")
"""The dictionary of a leaf's post-accumulate hooks, which is the leaf's own and no other's; None before the first."""


def leaf_hooks_of(leaf: Tensor) -> list[Any]:
    """Return every post-accumulate hook on a leaf."""
    hooks = leaf_hooks(leaf)
    return list(hooks.values()) if hooks else []


def place(hooks: dict[int, Any], hook_id: int, *, last: bool) -> None:
    """Put a hook before or after all others but FSDP2's, outside of which parameters are shards."""
    assert isinstance(hooks, OrderedDict)
    hooks.move_to_end(hook_id, last=last)
    of_fsdp = "FSDPState._post_forward" if last else "FSDPState._pre_forward"
    for outer in [key for key, hook in hooks.items() if getattr(hook, "__qualname__", "") == of_fsdp]:
        hooks.move_to_end(outer, last=last)
    # Guards of torch 2.11 go by the order in which hooks were inserted, not by the one they are in.
    if _BEFORE_2_13 and "torch._dynamo" in sys.modules and list(dict.keys(hooks)) != list(hooks):
        for hook_id, hook in list(hooks.items()):
            del hooks[hook_id]
            hooks[hook_id] = hook


_BEFORE_2_13: Final = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


Shards: TypeAlias = dict[tuple[int, str], Tensor]
"""The parameters that the optimizer has and whose hooks FSDP2 calls, by the id of their module and their name there."""


def fsdp_shards() -> Shards:
    """Return all parameters in this process that FSDP2 manages: while they are gathered, their modules show others.

    The model's own modules would not do: the parameters may be managed by a module around it.
    """
    composable = sys.modules.get("torch.distributed._composable_state")
    if composable is None:
        return {}
    states = {ref() for ref in list(composable._module_state_mapping.values())}
    found: Shards = {}
    for state in states:
        # One group until torch 2.11, then a list of them; a state of another kind has neither.
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for known in [known for group in groups if group is not None for known in group.fsdp_params]:
            info = known._module_info
            shared = zip(info.shared_modules, info.shared_param_names, strict=True)
            found |= {(id(at), name): known.sharded_param for at, name in ((info.module, info.param_name), *shared)}
    return found


def in_functional_call() -> bool:
    """Return whether this forward runs in ``torch.func.functional_call``, which lends the modules other parameters."""
    code = stateless._functional_call.__code__
    return any(frame.f_code is code for frame in _frames())


# -- modules that run: sites, observe, debug, factories, sglang ----------------------------------------------------
# Tested in test_torch_functions.py (running); the rest by behaviour: called_by_us in tests/sites/functions,
# in_recomputation by the tests of checkpointing in tests/sites and tests/observe.


def running() -> Iterator[nn.Module]:
    """Yield the modules whose calls are under way in this thread, the innermost first; not those in compiled code.

    The first takes 1.5 µs, of which 1 is reading the frame.
    """
    code = nn.Module._call_impl.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            yield frame.f_locals["self"]
        frame = frame.f_back


def times_running(module: nn.Module) -> int:
    """Return how many calls of that module are under way in this thread; those inside of compiled code do not show."""
    return sum(each is module for each in running())


def called_by_us(depth: int) -> bool:
    """Return whether ``sites/gradients.py``, and not the model, has called the function a hook is due for (0.2 µs).

    Without this, hooks on functions would fire for our own calls (``view_as``, for instance). ``depth`` says how many
    frames above this one the caller is: 2 in ``attach_function``, which calls this from what torch calls.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(depth - 1):
        if frame is not None:  # autograd's own threads begin in C++
            frame = frame.f_back
    if frame is not None and frame.f_globals is _OPS:  # an operator that was called as such
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == _WIRING


_OPS: Final = vars(sys.modules[OpOverload.__module__])
# Only calls that are made from gradients.py are passed over. If the wiring of gradients called torch from any other
# file, even from this one, hooks on functions would fire for them.
_WIRING: Final = "hookline.sites.gradients"


def in_recomputation() -> bool:
    """Return whether activation checkpointing is repeating a forward in this thread (0.1 µs outside of a backward
    pass).
    """
    if graph_task_id() == -1:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name == "torch.utils.checkpoint":
            return True
        if name == "torch.autograd.graph":
            return False  # a backward pass that a reentrant checkpoint runs, not the forward it repeats
        frame = frame.f_back
    return False


# -- functions, operators and modes: sites.functions alone; is_tracing: sites.compiled too -------------------------
# Tested in test_torch_functions.py (modes, handles_modes, is_native); the rest in tests/sites/functions by behaviour.


def handles_modes(function: Any) -> bool:
    """Return whether a Python function looks for modes itself, as torch asks of functions that want to be
    overridable.
    """
    code = getattr(function, "__code__", None)
    return code is not None and not _ASKS_FOR_MODES.isdisjoint(code.co_names)


def is_native(name: str, function: Any) -> bool:
    """Return whether a function is one of those that torch generates from its operators; all of them look for modes."""
    home = getattr(function, "__self__", None)
    if isinstance(home, ModuleType):
        return home.__name__.startswith("torch._C._") and home.__name__ != "torch._C._functorch"
    return isinstance(function, BuiltinFunctionType) and getattr(torch._C._VariableFunctions, name, None) == function


_ASKS_FOR_MODES: Final = frozenset(
    {"handle_torch_function", "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}
)


class ModeStack:
    """One of torch's two stacks of modes: of function modes, or of dispatch modes. Each thread has its own."""

    def __init__(self, *, height: Any, push: Any, pop: Any) -> None:
        self._height, self._push, self._pop = height, push, pop

    def slip_under(self, mode: Any) -> None:
        """Put a mode under those that are there, so that whoever leaves their block takes off their own.

        What ``torch.set_default_device`` has put there stays at the very bottom: it looks for itself in that place.
        """
        above = self._take_all()
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        lowest = [above.pop()] if above and above[-1] is default else []
        for each in (*lowest, mode, *reversed(above)):
            self._push(each)

    def take_out(self, mode: Any) -> bool:
        """Take a mode out, wherever it is in the stack; return whether it was there."""
        modes = self._take_all()
        kept = [other for other in modes if other is not mode]
        for each in reversed(kept):
            self._push(each)
        return len(kept) < len(modes)

    def _take_all(self) -> list[Any]:
        """Take all modes off; return them, the top one first."""
        return [self._pop() for _ in range(self._height())]


FUNCTION_MODES: Final = ModeStack(
    height=torch._C._len_torch_function_stack,
    push=torch._C._push_on_torch_function_stack,
    pop=torch._C._pop_torch_function_stack,
)
DISPATCH_MODES: Final = ModeStack(
    height=torch._C._len_torch_dispatch_stack,
    push=torch._C._push_on_torch_dispatch_stack,
    pop=functools.partial(torch._C._pop_torch_dispatch_stack, None),
)


operator_names: Final[Callable[[], list[str]]] = torch._C._dispatch_get_all_op_names
"""Every overload of every operator that the dispatcher knows: "aten::mm", "aten::mm.out", …"""


def operators_of(item: Any) -> list[OpOverload] | None:
    """Return the overloads that an overload, a packet of them, or what ``torch.library.custom_op`` gives stands for."""
    item = getattr(item, "_opoverload", item)
    if isinstance(item, OpOverload):
        return [item]
    if isinstance(item, OpOverloadPacket):
        return [getattr(item, name) for name in item.overloads()]  # type: ignore[no-untyped-call]
    return None


_TRACERS: Final = tuple(torch._C._TorchDispatchModeKey.__members__.values())
_mode_of: Final = torch._C._get_dispatch_mode


def is_tracing() -> bool:
    """Return whether what runs is a dry run with fake tensors, to compile or export what they go through (0.2 µs)."""
    return any(map(_mode_of, _TRACERS))  # a mode is always true


# -- optimizers: sites.optimizers, .module_hooks, integrations.follow ----------------------------------------------
# Tested in test_torch_optimizers.py.

_STEP: Final = cast(FunctionType, Optimizer.profile_hook_step(print)).__code__
"""What torch puts around the ``step`` of every optimizer class, to run the hooks: the same code in all of them."""


def optimizer_hooks(optimizer: Optimizer | None, kind: str) -> OrderedDict[int, Any]:
    """Return the dictionary of an optimizer's hooks of one kind (``step_pre``, ``load_state_dict_post``, …).

    Without an optimizer, that of the step hooks which torch runs for all.
    """
    hooks: OrderedDict[int, Any]
    if optimizer is None:
        hooks = getattr(optimizer_py, f"_global_optimizer_{kind.removeprefix('step_')}_hooks")
    else:
        hooks = getattr(optimizer, f"_optimizer_{kind}_hooks")
    return hooks


def takes_optimizer_hooks(optimizer: Optimizer, kind: str) -> bool:
    """Return whether there is such a dictionary; ``Optimizer.__init__`` makes it, which a wrapper may never call."""
    return hasattr(optimizer, f"_optimizer_{kind}_hooks")


def is_inner_step(optimizer: Optimizer) -> bool:
    """Return whether the step that runs its hooks is part of another step of the same optimizer (``super().step()``).

    Read off the stack, so that a step that raised leaves nothing behind.
    """
    steps = (frame for frame in _frames() if frame.f_code is _STEP and frame.f_locals.get("self") is optimizer)
    return len(list(itertools.islice(steps, 2))) == 2


def being_walked(hooks: dict[int, Any]) -> bool:
    """Return whether torch is in the middle of these hooks of an optimizer, or of saving and loading, in any thread,
    and fails if they change.

    torch walks the dictionary itself, and has the hook that it is at in a variable. At the last one it is through.
    """
    before_last = list(hooks.values())[:-1]
    for frame in itertools.chain.from_iterable(map(_frames, sys._current_frames().values())) if before_last else ():
        if frame.f_globals.get("__name__") in _WALKERS:
            at = [frame.f_locals.get(name) for name in ("pre_hook", "post_hook", "hook")]
            if any(hook is other for hook in before_last for other in at):
                return True
    return False


_WALKERS: Final = frozenset({optimizer_py.__name__, module_py.__name__})

# -- torch.compile while it traces: sites, observe, factories, specs -----------------------------------------------
# Tested in test_torch_compile.py.


def constant_while_tracing(function: _F) -> _F:
    """Decorate a function that the compiler calls while it traces, to take the answer for a constant.

    What ``torch.compiler.assume_constant_result`` does, without loading the compiler. The answer holds for as long as
    the graph does: ask nothing that may change between two calls of it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


if TYPE_CHECKING or not _BEFORE_2_13:

    class Unchanging:
        """Base of hooks that compiled code may trust never to change, nor anything it reads of them."""

        __slots__ = ()

else:

    class Unchanging(float):
        """Base of hooks that compiled code may trust never to change, nor anything it reads of them.

        Guards of torch 2.11 skip a whole model where no dictionary in it has changed (from Python 3.12 on), but only if
        all they look at is dictionaries, modules, functions, and values of types that cannot change, as numbers are.
        With 100 hooked modules that takes 0.18 ms in place of 0.9, and 0.07 without hooks (H200).
        """

        __slots__ = ()
        __eq__, __hash__, __repr__ = object.__eq__, object.__hash__, object.__repr__

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__new__(cls, 1)


# -- what inductor writes of ours: observe.watch.graph, sites.compiled.graph_passes --------------------------------
# Tested by behaviour alone: tests/sites/compiled, tests/observe/watch (test_graph_stats.py, test_watch_compiled.py).


def call_aten(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an operator of torch by its name with the overload."""
    return _aten(name)(*args, **kwargs)


def _aten(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def open_late(op: Any, meaning: Callable[..., Any]) -> None:
    """Let inductor write an operator of ours as other operators, once it writes loops; before that it is opaque.

    ``meaning`` is given the operator's arguments and what to call others by (as `call_aten`). Without inductor, or with
    one that knows no lowerings, nothing is done: the operator is then called. On 2.11 and 2.13.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    known = getattr(lowering, "lowerings", None)
    if known is None or op in known:
        return

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "_to_copy.default":
            return lowering.to_dtype(args[0], kwargs["dtype"])
        return known[_aten(name)](*args, **kwargs)

    def lowered(*args: Any) -> Any:
        return meaning(*args, call)

    lowering.register_lowering(op, type_promotion_kind=None)(lowered)


def join_late(op: Any) -> None:
    """Let inductor write what ``op(parts, kinds)`` joins into slices of one buffer for each kind, without a copy.

    Joined are every ``kinds``-th of the parts, beginning with each of the first ``kinds``. As `open_late` otherwise.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    ir: Any = sys.modules.get("torch._inductor.ir")
    known = getattr(lowering, "lowerings", None)
    if known is None or ir is None or op in known:
        return

    def lowered(parts: Any, kinds: int) -> Any:
        for part in parts:
            part.realize()
        return [ir.TensorBox(ir.ConcatKernel.create(list(parts[kind::kinds]), 0)) for kind in range(kinds)]

    lowering.register_lowering(op, type_promotion_kind=None)(lowered)


def lend_pass(switch: str, version: str, ours: Callable[[Any], bool]) -> bool:
    """Have inductor call ``ours`` with each graph at a switch of its configuration, until that returns True.

    The switches (``joint_custom_pre_pass``, ``post_grad_custom_pre_pass``, documented) are borrowed for some graphs,
    and what was there is called first; a graph that comes from the disk leaves it for the next. Return False if ours is
    there already, or there is no inductor. On 2.11 and 2.13.
    """
    passes: Any = sys.modules.get("torch._inductor.custom_graph_pass")
    config: Any = sys.modules.get("torch._inductor.config")
    before: Any = getattr(config, switch, None)
    if passes is None or config is None or getattr(before, "is_ours", False):
        return False

    several = isinstance(before, list | tuple)  # since 2.13
    theirs: Any = before if several else [] if before is None else [before]

    class Lent(passes.CustomGraphPass):  # type: ignore[misc]
        is_ours = True

        def __call__(self, graph: Any) -> None:
            setattr(config, switch, before)
            for each in theirs:
                each(graph)
            if not ours(graph):
                setattr(config, switch, self)

        def uuid(self) -> Any:
            # None, for one that has none, keeps the graph from the disk, as it would without ours.
            known = [each.uuid() if hasattr(each, "uuid") else None for each in theirs]
            return (f"hookline {version}", *known) if all(known) else None

    setattr(config, switch, Lent())
    return True


def records_graphs() -> bool:
    """Return whether inductor is compiling for CUDA graphs (``mode="reduce-overhead"``); asked while it calls ours."""
    return bool(sys.modules["torch._inductor.config"].triton.cudagraphs)


def is_known_to_be_at_most(size: Any, most: int) -> bool:
    """Return whether a size is one number in a compiled graph, not left open, and no larger than that. To be traced.

    Asking an open one whether ``size <= most`` would make the graph one for sizes of which the answer is the same; and
    one with an upper bound (``mark_dynamic(..., max=)``) is at most that, and still no number. On 2.11 and 2.13.
    """
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(size) and bool(size <= most)


# -- tensors, transforms, streams, scalers: sites.compiled, analyses, debug, factories, guard, integrations, metta, --
# -- observe -------------------------------------------------------------------------------------------------------
# Tested by behaviour alone, in the folders of tests that are named like those that use it.


@constant_while_tracing
def _is_ordinary(cls: type) -> bool:
    return getattr(cls, "__torch_dispatch__", None) == Tensor.__torch_dispatch__


@constant_while_tracing
def _has_local_part(cls: type) -> bool:
    return hasattr(cls, "to_local")


def local_tensor(tensor: Any) -> Any:
    """Return what an operator of ours can be given: the tensor, of a distributed one this process's part; else None.

    To be traced. None for other subclasses of tensors: an operator of ours could not be called with one.
    """
    if _is_ordinary(type(tensor)):
        return tensor
    return tensor.to_local() if _has_local_part(type(tensor)) else None


transforms_active: Final[Callable[[], bool]] = torch._C._are_functorch_transforms_active
"""Whether a transform of ``torch.func`` is at work in this thread (0.07 µs; to ask `is_wrapped` takes 0.5)."""
is_wrapped: Final = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor stands for others inside a transform of ``torch.func``, and has no numbers of its own."""


def current_stream_of(index: int) -> Callable[[], int]:
    """Return a function that returns the number of a CUDA device's current stream (0.1 µs;
    ``torch.cuda.current_stream`` takes 2).
    """
    return functools.partial(torch._C._cuda_getCurrentRawStream, index)


def has_numbers(tensor: Tensor) -> bool:
    """Return whether there are numbers in it that last: not if it stands for others in a transform, or is a fake
    one.
    """
    # FakeTensor and FunctionalTensor are there.
    return not is_wrapped(tensor) and not type(tensor).__module__.startswith("torch._subclasses.")


def scale_of(scaler: Any) -> Tensor | None:
    """Return what a ``GradScaler`` multiplies losses by, on its device, unread; None for one that does nothing
    (yet).
    """
    scale = getattr(scaler, "_scale", None)
    return scale if scaler.is_enabled() else None


@contextmanager
def between_scaler_steps(scaler: Any) -> Iterator[None]:
    """Let a ``GradScaler`` be as it is after ``update()`` while the block lasts, from inside of its ``step``.

    There it remembers that the gradients of this step are unscaled, and would refuse to unscale those of another.
    """
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is None:  # None, a scaler that is switched off, or one of another make
        yield
        return
    scaler._per_optimizer_states = type(states)(states.default_factory)
    try:
        yield
    finally:
        scaler._per_optimizer_states = states


# -- what is compiled and what is not: sites, observe, factories, debug, integrations, serve -----------------------
# Tested in test_torch_compile.py (leave_to_python) and test_torch_functions.py (counting_changes); the rest by
# behaviour, mostly in tests/sites/compiled.


def leave_to_python(*functions: Any, below: bool = True) -> None:
    """Keep the compiler from compiling one of these functions by itself: it runs as it is, with all it calls.

    Inlined into something else, they are traced like any other. ``below=False``: what they call may be compiled.
    """
    frames = torch._C._dynamo.eval_frame
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    for function in functions:
        strategy = frames._FrameExecStrategy(skip, skip if below else default)
        frames.set_code_exec_strategy(function.__code__, strategy)


untraced: Final = _disable_dynamo
"""Decorate what runs as it is, also where ``torch.compile`` meets it; imports the compiler at the first call only."""


def untraced_in_place(function: _F) -> _F:
    """Decorate what runs as it is, as `untraced` does, without a wrapper around it: that takes 2.5 µs at each call.

    The tracer reads the attribute and calls the function from outside of the graph; the code is never compiled by
    itself. Checked on 2.13; where the attribute were not read, the function would be traced like any other.
    """
    leave_to_python(function)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = None  # type: ignore[attr-defined]
    return function


def below_autograd(op: Any, args: tuple[Any, ...]) -> Any:
    """Call an operator from inside of its own kernel for autograd, so that the kernel below that one runs."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


@contextmanager
def counting_changes() -> Iterator[None]:
    """Count in-place changes in ``_version`` within this block, also behind an operator that was called in inference
    mode.
    """
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    outside = torch._C._dispatch_tls_local_exclude_set() - key
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), outside):
        yield


@contextmanager
def never_recomputed() -> Iterator[None]:
    """Save the operators of this block for the backward while the compiler traces, also under checkpointing."""
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    meta = traceback.current_meta
    if "recompute" not in meta:
        yield
        return
    before = meta["recompute"]
    meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        yield
    finally:
        meta["recompute"] = before


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def in_compiled_code() -> bool:
    """Return whether the compiler, or code it has made, calls; walks the stack, so not for hot paths."""
    return any(frame.f_globals.get("__name__", "").startswith(_COMPILERS) for frame in _frames())


_COMPILERS: Final = ("torch._dynamo.", "torch._functorch.", "torch._inductor.")


compilation: Final[Callable[[], object]] = torch._guards.CompileContext.current_compile_id
"""Which compilation is under way in this thread; None for none."""


@constant_while_tracing
def exporting() -> bool:
    """Return whether what is being traced is to be exported; torch 2.11 says so of everything, if asked directly."""
    return torch.compiler._is_exporting_flag


def capturing() -> bool:
    """Return whether what runs is being recorded as a CUDA graph (0.05 µs where CUDA was never used)."""
    return torch.cuda._initialized and torch.cuda.is_current_stream_capturing()


def replays_graph(module: nn.Module) -> bool:
    """Return whether ``torch.cuda.make_graphed_callables`` has put the replay of a CUDA graph in the place of the
    forward.
    """
    return getattr(module.__dict__.get("forward"), "__module__", None) == "torch.cuda.graphs"


def is_compiled_function(function: Any) -> bool:
    """Return whether it is what ``torch.compile(function)`` gives: its own code is compiled, not that of whoever calls
    it.
    """
    return hasattr(function, "_torchdynamo_orig_callable")


# -- the guard, on 2.11 and 2.13: guard; norms_of_all: debug.first_bad; flat: analyses -----------------------------
# Tested in test_torch_compile.py (dict_version, layout_check); the rest by behaviour: most of it in tests/guard.

copy_all: Final[Callable[..., None]] = torch._foreach_copy_
"""Copy a list of tensors into another; on a CUDA device a few launches for all of them."""

norms_of_all: Final[Callable[..., tuple[Tensor, ...]]] = torch._foreach_norm
"""Return the norm of each of several tensors, by few launches too."""


flat: Final[Callable[[list[Tensor]], Tensor]] = torch._utils._flatten_dense_tensors
"""Several tensors end to end, as one vector of its own; by hand it takes thrice as long."""


_COMPRESSED: Final = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def layout_check(tensors: list[Tensor]) -> Callable[[], bool] | None:
    """Return a call that tells whether all tensors have the shapes, strides and dtypes that they have now; else None.

    What guards of compiled code are checked by: 600 tensors in 40 µs, where asking for shapes alone takes 110. It also
    says no if one requires gradients and did not, or the reverse, which the guard goes by; or if a mode such as
    autocast is on that was not. On 2.11 and 2.13.
    """
    if not tensors or any(tensor.layout in _COMPRESSED for tensor in tensors):
        return None  # asked for the strides of a compressed one, torch ends the process
    try:
        make: Any = torch._C._dynamo.guards.TensorGuards
        check = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (TypeError, RuntimeError):
        return None
    return lambda: bool(check(*tensors))


def set_versions(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
    """Set the version counters of tensors back; right only where their numbers are those of that time."""
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)


def own_part(tensor: Any) -> Any:
    """Return what has the memory: of a distributed tensor (DTensor) this process's part, the same object each time."""
    return tensor if type(tensor) in _WITH_MEMORY else getattr(tensor, "_local_tensor", tensor)


_WITH_MEMORY: Final = frozenset({Tensor, nn.Parameter})

TENSOR_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a tensor: None before the first hook, then a dictionary that its handles refer to weakly."""


identity_of: Final[Callable[[Tensor], int]] = operator.attrgetter("_cdata")
"""Which insides a tensor object has; ``torch.utils.swap_tensors`` exchanges those of two objects."""


_HAS_WATCHERS: Final = sys.version_info[:3] != (3, 13, 0)  # which tells nobody that an attribute of an object is set
dict_version: Final[Callable[[dict[str, Any]], int] | None] = (
    getattr(getattr(torch._C._dynamo, "guards", None), "dict_version", None) if _HAS_WATCHERS else None
)
"""Return a number that is another one after any change of a plain dictionary (0.1 µs; guards of compiled code go by
it): that of CPython itself up to 3.11, from 3.12 on one that torch keeps by CPython's watchers. None where torch has
none, or one that misses changes. On 2.11 to 2.15."""

use_count: Final[Callable[[Tensor], int]] = cast(Any, torch._C.TensorBase)._use_count
"""How many refer to the insides: the object itself, graphs that accumulate into it, views of it."""


swap_insides: Final[Callable[[Tensor, Tensor], None]] = torch._C._swap_tensor_impl
"""Exchange the insides of two tensor objects, whoever refers to them; torch's own verb refuses most of that."""


def is_right_accumulator(node: Any, leaf: Tensor) -> bool:
    """Return whether ``node`` expects gradients of the shape and dtype that ``leaf`` has now."""
    expected = node._input_metadata[0]
    return tuple(expected.shape) == tuple(leaf.shape) and expected.dtype == leaf.dtype


def forget_accumulator(leaf: Tensor) -> None:
    """Make the next graph use a new accumulating node, as torch does where data of another dtype come."""
    data = leaf.data
    other = torch.float32 if leaf.dtype is torch.float64 else torch.float64
    leaf.data = torch.empty(0, dtype=other, device=leaf.device)
    leaf.data = data


def allow_accumulator(node: Any) -> None:
    """Take off the hook by which ``swap_tensors`` forbids a backward pass into a leaf, also where it then refused."""
    handle = node.register_prehook(lambda grads: None)
    hooks = handle.hooks_dict_ref()
    for key, hook in list(hooks.items()):
        if getattr(hook, "__qualname__", "") == "swap_tensors.<locals>.error_pre_hook":
            del hooks[key]
    handle.remove()


def default_device() -> torch.device | None:
    """Return what ``torch.set_default_device`` was given; None if nothing, which costs less than the CPU by name."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


_PRECISIONS: Final = tuple(
    [("generic", "all")] + [(where, what) for where in ("cuda", "mkldnn") for what in ("all", "matmul", "conv", "rnn")]
)


def precision() -> tuple[str, ...]:
    """Return how exact products of float32 have to be: the old setting, then the new ones for each place."""
    return (torch.get_float32_matmul_precision(), *(torch._C._get_fp32_precision_getter(*at) for at in _PRECISIONS))


def set_precision(values: tuple[str, ...]) -> None:
    """Set what `precision` returned; the old setting first, since it sets some of the new ones."""
    torch.set_float32_matmul_precision(values[0])
    for (where, what), value in zip(_PRECISIONS, values[1:], strict=True):
        if torch._C._get_fp32_precision_getter(where, what) != value:
            torch._C._set_fp32_precision_setter(where, what, value)


def autocast_nesting() -> int:
    """Return how many autocast blocks this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def set_autocast_nesting(depth: int) -> None:
    """Set how many autocast blocks this thread is in; forget the casts of one that never ended."""
    while autocast_nesting() > depth:
        torch.autocast_decrement_nesting()
    while autocast_nesting() < depth:
        torch.autocast_increment_nesting()


KERNEL_SWITCHES: Final[dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]] = {
    name: (getattr(torch._C, ask), getattr(torch._C, tell))
    for name, ask, tell in (
        ("cudnn.enabled", "_get_cudnn_enabled", "_set_cudnn_enabled"),
        ("cudnn.benchmark", "_get_cudnn_benchmark", "_set_cudnn_benchmark"),
        ("cudnn.deterministic", "_get_cudnn_deterministic", "_set_cudnn_deterministic"),
        ("mkldnn.enabled", "_get_mkldnn_enabled", "_set_mkldnn_enabled"),
        ("mkldnn.deterministic", "_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
        ("flash attention", "_get_flash_sdp_enabled", "_set_sdp_use_flash"),
        ("memory-efficient attention", "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
        ("plain attention", "_get_math_sdp_enabled", "_set_sdp_use_math"),
        ("cudnn attention", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
        ("deterministic fill", "_get_deterministic_fill_uninitialized_memory",
         "_set_deterministic_fill_uninitialized_memory"),
        ("autograd's threads", "_is_multithreading_enabled", "_set_multithreading_enabled"),
    )
    if hasattr(torch._C, ask) and hasattr(torch._C, tell)
}  # fmt: skip
"""Switches of the process that decide by which kernels it computes: how to ask, how to set."""

CONVERSION_SWITCHES: Final[dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]] = {
    "swapping parameters on conversion": (
        torch.__future__.get_swap_module_params_on_conversion,
        torch.__future__.set_swap_module_params_on_conversion,
    ),
    "overwriting parameters on conversion": (
        torch.__future__.get_overwrite_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
    ),
}
"""What ``module.to()`` and the like do with parameters."""


REDUCTIONS: Final = ("_cublas_allow_fp16_reduced_precision_reduction", "_cublas_allow_bf16_reduced_precision_reduction")


def reductions() -> tuple[Any, ...]:
    """Return whether matrix products on CUDA may add up in half precision."""
    return tuple(getattr(torch._C, f"_get{name}")() for name in REDUCTIONS)


def set_reductions(values: tuple[Any, ...]) -> None:
    """Set what `reductions` returned."""
    for name, value in zip(REDUCTIONS, values, strict=True):
        tell = getattr(torch._C, f"_set{name}")
        tell(*value) if isinstance(value, tuple) else tell(value)
