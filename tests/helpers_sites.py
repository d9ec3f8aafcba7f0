"""Adapters for tests that hold for every place that takes hooks: modules, parameters, functions, tensors, optimizers.

`tests/sites/test_conformance_*.py` runs each promise over `SITES`. A new site type needs a `Place`, and a line in
`_KINDS` with its kinds.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import hookline as hl
from hookline.sites.kinds import KINDS_OF_OPTION, NODE

__all__ = [
    "CALL",
    "COPIES",
    "SITES",
    "VARIANTS",
    "AmongForeignHooks",
    "Double",
    "OnClass",
    "OnFunction",
    "OnModule",
    "OnOperator",
    "OnOptimizer",
    "Place",
    "WithKwargs",
    "chosen",
    "ignore",
    "noting",
]

FORWARD = ["forward_pre", "forward"]
GRADIENT = ["backward_pre", "backward"]
CALL = [*FORWARD, *GRADIENT]
STATE = ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]
STEP = ["step_pre", "step_post"]


def ignore(*args: object, **kwargs: object) -> None:
    """A hook of any kind that does nothing."""


def noting(log: list[str], text: str) -> Callable[..., None]:
    """A hook of any kind that notes that it ran."""
    return lambda *args, **kwargs: log.append(text)


def pickled(value: Any) -> Any:
    """Return a copy by way of a pickle."""
    return pickle.loads(pickle.dumps(value))


def saved_and_loaded(value: Any) -> Any:
    """Return a copy by way of a file of torch's."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": saved_and_loaded}


class Double(torch.autograd.Function):
    """A function class to hook."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


def hook_lists(owner: Any) -> dict[str, list[Any]]:
    """Return all that torch keeps in dictionaries of hooks on an object."""
    return {name: list(value) for name, value in vars(owner).items() if "hooks" in name and isinstance(value, dict)}


def process_traces() -> dict[str, Any]:
    """Return the hooks and modes of the process: torch's dictionaries of global hooks, its stacks of modes."""
    found: dict[str, Any] = {"class": "apply" in vars(Double)}
    for owner in (torch_module, torch_optimizer):
        found |= {name: hooks for name, hooks in hook_lists(owner).items() if name.startswith("_global")}
    found["modes"] = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return found


class Place:
    """One kind of hook at one place: how a hook is put on, what makes it fire once, what it leaves.

    A subclass has ``attach``, ``run`` and what of the rest is different there.
    """

    process_wide = False
    """The hooks are not those of one object, so there is no owner to copy or to free."""
    owns_hooks = True
    """The owner holds its hooks in Python, so that the collector sees a ring of owner and hook."""
    single = False
    """Of several hooks only the last one is asked."""
    of_one_thread = False
    """The hooks fire in the thread that put them on."""
    keeps_owner = False
    """A hook that stays on keeps what it is on alive, as torch's own does there."""
    late = False
    """A hook that comes between forward and backward takes part in that backward."""
    prepends = True
    options: dict[str, Any] = {}

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def attach(self, hook: Any, **options: Any) -> hl.HookHandle:
        """Put a hook on; the kind and the options of the place are given with it."""
        return self.put(hook, **{"on": self.kind, **self.options, **options})

    def put(self, hook: Any, **options: Any) -> hl.HookHandle:
        """Put a hook on."""
        raise NotImplementedError

    def run(self) -> list[Tensor]:
        """Fire each hook once; return numbers that an edit would change."""
        raise NotImplementedError

    def begin(self) -> Callable[[], object]:
        """Run the forward; return what runs the backward."""
        raise NotImplementedError

    @property
    def owner(self) -> Any:
        """Return the object that carries the hooks."""
        return None

    def parts(self) -> list[Any]:
        """Return what has to go when the owner goes."""
        return [self.owner]

    def attached(self) -> list[hl.HookHandle] | None:
        """Return the handles that can be found from the owner; None where it does not know them."""
        return hl.attached(self.owner)

    def traces(self) -> dict[str, Any]:
        """Return all hooks on the place and in the process."""
        return process_traces()

    def twin(self, duplicate: Callable[[Any], Any]) -> Place:
        """Return the same place on a copy of the owner."""
        raise NotImplementedError

    def foreign(self, hook: Any) -> Any:
        """Put a hook on by torch alone; None where torch has no such hook."""
        return None

    def settle(self) -> None:
        """Change some hook there: what could not go in the middle of a walk of torch's goes now."""

    @property
    def edits(self) -> bool:
        """Say whether the kind takes ``observe=``."""
        return NODE.aliases.get(self.kind, self.kind) in KINDS_OF_OPTION["observe"]

    @property
    def ignores_returns(self) -> bool:
        """Say whether the return value of a hook means nothing."""
        return not self.edits

    @property
    def in_backward(self) -> bool:
        """Say whether the kind fires in the backward pass."""
        return self.kind in {*GRADIENT, "full_backward", "param_grad", "grad", "pre", "post"}


class OnModule(Place):
    """A module of a model."""

    def __init__(self, kind: str, model: nn.Module | None = None) -> None:
        super().__init__(kind)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 2)) if model is None else model
        self.layer = self.model[0]
        self.called = self.model

    def settle(self) -> None:
        hl.attach(self.model, "*", ignore).remove(quiet=True)

    def put(self, hook: Any, **options: Any) -> hl.HookHandle:
        return hl.attach(self.model, "0", hook, **options)

    @property
    def owner(self) -> nn.Module:
        return self.model

    def parts(self) -> list[Any]:
        return [*self.model.modules(), *self.model.parameters()]

    def run(self) -> list[Tensor]:
        """One forward, backward, save, load and registration of each sort."""
        layer, x = self.layer, torch.ones(1, 2, requires_grad=True)
        layer.zero_grad()
        output = self.called(x)
        output.sum().backward()
        layer.load_state_dict(layer.state_dict())
        layer.child = nn.Identity()
        layer.number = nn.Parameter(torch.ones(1))
        layer.register_buffer("kept", torch.ones(1))
        result = [output, x.grad, layer.weight.grad, layer.number, layer.kept]
        del layer.child, layer.number, layer.kept
        return result

    def begin(self) -> Callable[[], object]:
        return self.called(torch.ones(1, 2, requires_grad=True)).sum().backward

    def traces(self) -> dict[str, Any]:
        found = super().traces()
        for name, module in self.model.named_modules():
            attributes = sorted({*vars(module)} - {"_compiled_call_impl"})  # which a copy lacks
            found[name] = hook_lists(module), module._is_full_backward_hook, attributes
        for name, parameter in self.model.named_parameters():
            found[name] = list(parameter._backward_hooks or []), list(parameter._post_accumulate_grad_hooks or [])
        return found

    def twin(self, duplicate: Callable[[Any], Any]) -> Place:
        return type(self)(self.kind, duplicate(self.model))

    def foreign(self, hook: Any) -> Any:
        if self.kind == "param_grad":
            return self.layer.weight.register_post_accumulate_grad_hook(hook)
        names = {"backward": "full_backward", "backward_pre": "full_backward_pre"}
        return getattr(self.layer, f"register_{names.get(self.kind, self.kind)}_hook")(hook)


class AmongForeignHooks(OnModule):
    """A module on which others have hooks before ours and behind them."""

    def __init__(self, kind: str, model: nn.Module | None = None) -> None:
        super().__init__(kind, model)
        if model is None:
            for register in (self.layer.register_forward_pre_hook, self.layer.register_forward_hook):
                register(ignore)
                register(ignore, with_kwargs=True)


class WithKwargs(AmongForeignHooks):
    """A module whose hooks get the keyword arguments too."""

    options = {"with_kwargs": True}


class AlwaysCalled(OnModule):
    """A module whose hooks run however the call ends."""

    options = {"always_call": True}


class OfOneContext(OnModule):
    """A module whose hooks are for this thread alone."""

    options, of_one_thread = {"scope": "context"}, True


class OnParameter(OnModule):
    """A parameter of a model."""

    late = True

    def put(self, hook: Any, **options: Any) -> hl.HookHandle:
        return hl.attach(self.model, "0.weight", hook, **options)


class Everywhere(OnModule):
    """Every module of the process, of which one is called."""

    process_wide = True

    def __init__(self, kind: str, model: nn.Module | None = None) -> None:
        super().__init__(kind, model)
        self.called = self.layer

    def put(self, hook: Any, **options: Any) -> hl.HookHandle:
        return hl.attach_everywhere(hook, **options)


class OnFunction(Place):
    """A function, an operator or a class."""

    process_wide, of_one_thread = True, True
    target: Any = staticmethod(torch.nn.functional.relu)
    call: Callable[[Tensor], Tensor] = staticmethod(torch.nn.functional.relu)

    def put(self, hook: Any, **options: Any) -> hl.HookHandle:
        return hl.attach_function(self.target, hook, **options)

    def run(self) -> list[Tensor]:
        x = torch.ones(2, requires_grad=True)
        output = self.call(x)
        output.sum().backward()
        return [output, x.grad]

    def begin(self) -> Callable[[], object]:
        return self.call(torch.ones(2, requires_grad=True)).sum().backward

    def attached(self) -> list[hl.HookHandle] | None:
        return None


class OnOperator(OnFunction):
    """An operator of torch's."""

    target, call = "aten.relu", staticmethod(torch.relu)


class OnClass(OnFunction):
    """A function class of one's own."""

    of_one_thread, target, call = False, Double, staticmethod(Double.apply)


class OnOptimizer(Place):
    """An optimizer."""

    def __init__(self, kind: str, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__(kind)
        self.optimizer = optimizer or torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        self.parameter = self.optimizer.param_groups[0]["params"][0]

    def put(self, hook: Any, **options: Any) -> hl.HookHandle:
        return hl.attach_optimizer(self.optimizer, hook, **options)

    @property
    def owner(self) -> torch.optim.Optimizer:
        return self.optimizer

    def run(self) -> list[Tensor]:
        self.parameter.grad = torch.ones(1)
        self.optimizer.step()
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        return [self.parameter.detach().clone()]

    def traces(self) -> dict[str, Any]:
        return super().traces() | hook_lists(self.optimizer)

    def twin(self, duplicate: Callable[[Any], Any]) -> Place:
        return type(self)(self.kind, duplicate(self.optimizer))

    def foreign(self, hook: Any) -> Any:
        return getattr(self.optimizer, f"register_{self.kind}_hook")(hook)

    def settle(self) -> None:
        self.put(ignore, on=self.kind).remove()

    @property
    def ignores_returns(self) -> bool:
        return self.kind in ("step_post", "state_dict_pre", "load_state_dict_post")


class OnEveryOptimizer(OnOptimizer):
    """Every optimizer of the process."""

    process_wide = True

    def put(self, hook: Any, **options: Any) -> hl.HookHandle:
        return hl.attach_everywhere(hook, **options)

    def foreign(self, hook: Any) -> Any:
        return getattr(torch_optimizer, f"register_optimizer_{self.kind}_hook")(hook)


class OnTensor(Place):
    """A computed tensor."""

    late, prepends, owns_hooks = True, False, False  # the graph, which is not Python's, holds them

    def __init__(self, kind: str, leaf: Tensor | None = None) -> None:
        super().__init__(kind)
        self.leaf = torch.ones(2, requires_grad=True) if leaf is None else leaf
        self.computed, self.other = self.leaf * 2, self.leaf * 3
        self.loss = (self.computed + self.other).sum()

    def put(self, hook: Any, **options: Any) -> hl.HookHandle:
        return hl.attach_tensor(self.computed, hook, **options)

    @property
    def owner(self) -> Tensor:
        return self.leaf

    def parts(self) -> list[Any]:
        return [self.leaf, self.computed, self.other]

    def run(self) -> list[Tensor]:
        self.leaf.grad = None
        self.loss.backward(retain_graph=True)
        return [self.leaf.grad]

    def begin(self) -> Callable[[], object]:
        return functools.partial(self.loss.backward, retain_graph=True)

    def traces(self) -> dict[str, Any]:
        found = super().traces()
        for name, tensor in (("leaf", self.leaf), ("computed", self.computed), ("other", self.other)):
            found[name] = list(tensor._backward_hooks or []), list(tensor._post_accumulate_grad_hooks or [])
        return found

    def twin(self, duplicate: Callable[[Any], Any]) -> Place:
        return type(self)(self.kind, duplicate(self.leaf))

    def attached(self) -> list[hl.HookHandle] | None:
        return None

    def foreign(self, hook: Any) -> Any:
        return self.computed.register_hook(hook)


class OnLeaf(OnTensor):
    """A leaf, on which gradients accumulate."""

    def put(self, hook: Any, **options: Any) -> hl.HookHandle:
        return hl.attach_tensor(self.leaf, hook, **options)

    def foreign(self, hook: Any) -> Any:
        return (self.leaf.register_hook if self.kind == "grad" else self.leaf.register_post_accumulate_grad_hook)(hook)


class OnSeveralTensors(OnTensor):
    """Several tensors together."""

    mode, keeps_owner = "all", True

    def put(self, hook: Any, **options: Any) -> hl.HookHandle:
        return hl.attach_tensor([self.computed, self.other], hook, mode=self.mode, **options)

    def foreign(self, hook: Any) -> Any:
        tensors = [self.computed, self.other]
        return torch.autograd.graph.register_multi_grad_hook(tensors, hook, mode=self.mode)

    @property
    def ignores_returns(self) -> bool:
        return True


class OnAnyOfSeveralTensors(OnSeveralTensors):
    """The first of several tensors to have its gradient."""

    mode, keeps_owner = "any", False


class OnNode(OnTensor):
    """A node of the graph."""

    def put(self, hook: Any, **options: Any) -> hl.HookHandle:
        return hl.attach_node(self.computed.grad_fn, hook, **options)

    def foreign(self, hook: Any) -> Any:
        node = self.computed.grad_fn
        return (node.register_prehook if self.kind == "pre" else node.register_hook)(hook)


class OnLeafNode(OnTensor):
    """The node that accumulates into a leaf."""

    keeps_owner = True

    def put(self, hook: Any, **options: Any) -> hl.HookHandle:
        return hl.attach_node(self.leaf, hook, **options)

    def foreign(self, hook: Any) -> Any:
        self.node = torch.autograd.graph.get_gradient_edge(self.leaf).node  # kept: torch's hooks go with it
        return (self.node.register_prehook if self.kind == "pre" else self.node.register_hook)(hook)


_KINDS: list[tuple[type[Place], list[str]]] = [
    (OnModule, [*CALL, "full_backward", *STATE]),
    (OnParameter, ["param_grad"]),
    (Everywhere, [*CALL, "full_backward"]),
    (OnFunction, CALL),
    (OnOperator, FORWARD),
    (OnClass, CALL),
    (OnOptimizer, [*STEP, *STATE]),
    (OnEveryOptimizer, STEP),
    (OnTensor, ["grad"]),
    (OnLeaf, ["grad", "param_grad"]),
    (OnSeveralTensors, ["grad"]),
    (OnAnyOfSeveralTensors, ["grad"]),
    (OnNode, ["pre", "post"]),
    (OnLeafNode, ["pre", "post"]),
]
_VARIANTS: list[tuple[type[Place], list[str]]] = [
    (AmongForeignHooks, [*CALL, "full_backward"]),
    (WithKwargs, FORWARD),
    (AlwaysCalled, ["forward"]),
    (OfOneContext, CALL),
]


def _sites(table: list[tuple[type[Place], list[str]]]) -> Iterator[Any]:
    for place, kinds in table:
        for kind in kinds:
            yield pytest.param(functools.partial(place, kind), id=f"{place.__name__}-{kind}")


SITES = list(_sites(_KINDS))
"""Every kind of hook at every sort of place, as test parameters: call one to make the place."""
VARIANTS = [*SITES, *_sites(_VARIANTS)]
"""The same with options of `attach` that have a path of their own, and beside hooks of others."""


def chosen(sites: list[Any], wanted: Callable[[Place], object]) -> list[Any]:
    """Return the sites of which a claim holds."""
    return [site for site in sites if wanted(site.values[0]())]
