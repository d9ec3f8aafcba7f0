"""Notice what a loop does without an edit in it: the losses of its backwards, and the passes over its loader.

`Follow` makes a `BackwardLosses` and calls `follow_passes`. Both change torch's functions for as long as they last, and
leave the tensors of the loop as they are; the device is not waited for. Where nobody says what is trained, `FirstStep`
waits for the first step of an optimizer in this process, and `find_model` finds the model among all modules that are
alive: for ``sitecustomize`` of ``script_start``, the callback for Fabric and `hookline.audit`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from hookline.distributed.shards import placed
from hookline.errors import NoMatchError, UnhookableError
from hookline.messages import type_name
from hookline.phases import phase
from hookline.sites import _torch
from hookline.sites.functions.wrapped import around_backward, wrapped
from hookline.sites.optimizers import unwrap_optimizer

# -- losses ------------------------------------------------------------------------------------------------------

_MOST_PARAMETERS: Final = 256
"""Of how many parameters gradients are looked at: 50 µs."""


class _Noted(NamedTuple):
    """The loss of one backward."""

    loss: Tensor
    is_own: bool
    """Whether its backward has changed a gradient of the model: else it is the loss of another one."""


_Mark: TypeAlias = tuple[int, int] | None
"""Which gradient a parameter has, and how often that was changed; None if it has none."""


class BackwardLosses:
    """Add up the numbers on which ``backward()`` was called since `take` was called last.

    Recipe::

        losses = BackwardLosses()
        (model(x).square().mean() / 2).backward()
        (model(y).square().mean() / 2).backward()
        losses.take()  # their sum, which is the loss of the step

    When ``zero_grad`` or the loop clears gradients between two backwards, the losses before are no part of a step.

    Args:
        scaler: The `GradScaler` that the loop multiplies its losses by; None if there is none.
        most: How many are kept at most; later ones are passed over.
        parameters: Those that are trained.
        on_backward: Called before each backward of a loss.
        on_forget: Called when losses turn out to be no part of a step.
    """

    def __init__(
        self,
        scaler: Any = None,
        *,
        most: int = sys.maxsize,
        parameters: Iterable[Tensor] = (),
        on_backward: Callable[[], None] = lambda: None,
        on_forget: Callable[[], None] = lambda: None,
    ) -> None:
        self._scaler, self._most = scaler, most
        self._on_backward, self._on_forget = on_backward, on_forget
        every = tuple(parameters)
        self._looked_at = every[:: -(-len(every) // _MOST_PARAMETERS) or 1]
        """Parameters whose gradients tell of which model a backward was, evenly from first to last."""
        self._noted: list[_Noted] = []
        self._begun: list[Tensor] = []
        """The losses of the backward that is under way."""
        self._before: list[_Mark] = []
        self._after: list[_Mark] = []
        """The marks of the gradients before a backward, and after the last one."""
        self._is_cleared = False
        """Whether ``zero_grad`` has changed gradients since the last backward that was noted."""
        self.is_closure = False
        """Whether the step calls a closure, which clears gradients each time: nothing is forgotten until `take`, which
        returns the first loss."""
        owners = (Optimizer, nn.Module) if self._looked_at else ()
        self._ends = [wrapped(owner, "zero_grad", self._zero_grad) for owner in owners]
        self._ends.append(around_backward(self._begin, self._end))

    def take(self) -> Tensor | None:
        """Return their sum, on its device; None if there were none. Begin anew."""
        noted, is_closure = self._noted, self.is_closure
        self._noted, self.is_closure, self._is_cleared = [], False, False
        # If none is of the model, gradients are kept where nobody looks.
        losses = [one.loss for one in noted if one.is_own] or [one.loss for one in noted]
        if len(losses) < 2 or is_closure:
            return losses[0] if losses else None
        with torch.no_grad():
            return sum((loss.reshape(()) for loss in losses[1:]), start=losses[0].reshape(()))

    def hand_to(self, other: BackwardLosses) -> None:
        """Let ``other`` have those that were noted here, which began to listen later."""
        other._noted = [_Noted(other._without_scale(one.loss), True) for one in self._noted] + other._noted
        self._noted = []

    def forget(self) -> None:
        """Begin anew: what was noted belongs to no step."""
        self._noted, self._is_cleared = [], False
        self._on_forget()

    def remove(self) -> None:
        """Notice nothing more; may be called again."""
        for end in self._ends:
            end()
        self._noted = []

    # -- called around each backward ---------------------------------------------------------------------

    def _begin(self, tensors: Sequence[Any]) -> None:
        """Note the losses of training: single real numbers, outside of interventions and evaluations."""
        losses = [one for one in tensors if isinstance(one, Tensor) and one.numel() == 1 and one.is_floating_point()]
        if phase() != "train" or not losses or len(self._noted) >= self._most:
            return
        self._before = list(map(_mark, self._looked_at))
        if self._noted and not self.is_closure and (self._is_cleared or self._are_all_gone()):
            self.forget()
        self._on_backward()
        self._begun = [self._without_scale(one.detach()) for one in losses]

    def _end(self) -> None:
        """Look whether the backward has changed a gradient."""
        if self._begun:
            begun, self._begun = self._begun, []
            self._after = list(map(_mark, self._looked_at))
            is_own = self._after != self._before or any(placed(each) is not None for each in self._looked_at[:1])
            self._noted += [_Noted(loss, is_own) for loss in begun]

    def _without_scale(self, loss: Tensor) -> Tensor:
        scale = None if self._scaler is None else _torch.scale_of(self._scaler)
        return loss if scale is None else loss / scale

    def _are_all_gone(self) -> bool:
        """Return whether none of the gradients is there that were after the last backward."""
        return any(self._after) and not any(
            now for now, then in zip(self._before, self._after, strict=True) if then is not None
        )

    def _zero_grad(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``zero_grad``, and note whether it has cleared gradients of the losses."""
        if not self._noted or self.is_closure:
            return original(*args, **kwargs)
        before = list(map(_exact_mark, self._looked_at))
        found = original(*args, **kwargs)
        self._is_cleared |= list(map(_exact_mark, self._looked_at)) != before
        return found


def _exact_mark(parameter: Tensor) -> _Mark:
    """Return something that changes with the gradient of a parameter."""
    grad = parameter.grad
    return None if grad is None else (id(grad), grad._version)


def _mark(parameter: Tensor) -> _Mark:
    """Return what tells of a change of a gradient; of FSDP2, which adds inside of one, whether there is any."""
    return _exact_mark(parameter) if placed(parameter) is None or parameter.grad is None else (0, 0)


# -- batches -----------------------------------------------------------------------------------------------------


class PassListener(Protocol):
    """What is told of the passes over a loader."""

    def take_batch(self, each: LoaderPass) -> None:
        """Take the batch of a pass, before the loop gets it."""

    def end_pass(self, each: LoaderPass) -> None:
        """Hear that there is no batch left."""


def follow_passes(loader: Any, listener: PassListener) -> Callable[[], None]:
    """Tell ``listener`` when ``loader`` gives a batch and when a pass over it ends, however the loop iterates it.

    The ``__iter__`` of the loader's class is wrapped for as long as it is followed: the iterator of the loader is put
    into a `LoaderPass`, which hands everything through. Other objects of the class get their own iterator.

    Args:
        loader: A ``DataLoader``, or an object of any class in Python that can be iterated; or such a class, for all of
            its objects.
        listener: It hears of passes that are under way when this ends, too.

    Returns:
        The function that ends it; it may be called again.
    """

    def iterate(original: Any, each: Any) -> Any:
        is_followed = each is loader or isinstance(loader, type)
        return LoaderPass(original(each), listener, each) if is_followed else original(each)

    return wrapped(_owner_of_iter(loader if isinstance(loader, type) else type(loader)), "__iter__", iterate)


class LoaderPass:
    """One pass over a loader: the loader's own iterator, with its batches announced."""

    def __init__(self, iterator: Iterator[Any], listener: PassListener, loader: Any) -> None:
        self._iterator = iterator
        self.listener = listener
        """What is told of the rest of the pass."""
        self.loader = loader
        """The loader that the pass goes over."""
        self.batch: Any = None
        """The batch that was given last."""
        self.count = 0
        """How many batches were given."""
        self.is_over = False
        """Whether the last batch was given."""

    def __iter__(self) -> LoaderPass:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.batch = None
            if not self.is_over:
                self.is_over = True
                self.listener.end_pass(self)
            raise
        self.batch = batch
        self.count += 1
        self.listener.take_batch(self)
        return batch

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]  # raises as the iterator itself would

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle the iterator itself, where that can be: a copy is no pass of the loop."""
        return self._iterator.__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _owner_of_iter(loader_type: type) -> type:
    """Return the class in which the ``__iter__`` of a loader is written."""
    owner = next((base for base in loader_type.__mro__ if "__iter__" in vars(base)), None)
    if owner is None or not owner.__flags__ & _HEAP_TYPE:
        raise UnhookableError(
            f"loader= is {type_name(loader_type)}, whose iteration cannot be followed: its class is not written in "
            "Python. Next: give a DataLoader (DataLoader(data, batch_size=None) gives the items of a list as they "
            "are), or leave loader= out; then everything is one epoch."
        )
    return owner


_HEAP_TYPE: Final = 1 << 9
"""Of a class whose attributes can be set; those written in C lack it."""


# -- the first step of a process ---------------------------------------------------------------------------------

_MOST_LOSSES: Final = 1000
"""How many are kept until the first step: in a process that makes none, they would be kept for ever."""


class FirstStep:
    """Call a function at the first step of an optimizer, before it changes any weight.

    Recipe::

        def begin(optimizer, first):
            first.hand_over(hookline.follow(model, optimizer, ["norms"], loader=first.loader))
            return True  # False: wait for another optimizer; this one is not asked about again


        FirstStep(begin)

    Args:
        begin: Called with the optimizer and this object; returns whether the wait is over.
        at_batch: Called with this object when a ``DataLoader`` gives a batch, before the loop gets it, for those who
            can tell the optimizer before it makes a step; returns whether the wait is over.
    """

    def __init__(
        self, begin: Callable[[Any, FirstStep], bool], at_batch: Callable[[FirstStep], bool] = lambda first: False
    ) -> None:
        self._begin = begin
        self._at_batch = at_batch
        self._is_over = False
        self._latest: LoaderPass | None = None
        self._others: WeakSet[Any] = WeakSet()  # looking for the model of one takes longer than most steps
        self._handle = register_optimizer_step_pre_hook(self._take_step)
        self._stop_passes = follow_passes(DataLoader, self)
        self._losses = BackwardLosses(most=_MOST_LOSSES)

    @property
    def loader(self) -> Any:
        """The ``DataLoader`` whose batch was taken last, in a pass that is not over; None if there is none."""
        return None if self._latest is None or self._latest.is_over else self._latest.loader

    def hand_over(self, run: Any) -> None:
        """Give a `Follow` what was noted: the losses, and the pass over its loader that is under way."""
        run.take_over(self._latest, self._losses)

    def remove(self) -> None:
        """Wait no more; may be called again."""
        self._is_over = True
        self._handle.remove()
        self._stop_noting()

    def _stop_noting(self) -> None:
        self._stop_passes()
        self._losses.remove()
        self._latest = None

    def take_batch(self, each: LoaderPass) -> None:
        """Remember the pass, and ask whether the wait is over."""
        if self._is_over:
            return
        self._latest = each
        if phase() != "intervention" and self._at_batch(self):
            self.remove()
            each.listener.take_batch(each)  # the one who has begun gets this batch

    def end_pass(self, each: LoaderPass) -> None:
        """Wait on: the pass knows that it is over."""

    def _take_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_over or phase() == "intervention":
            return
        if optimizer not in self._others:
            self._is_over = self._begin(optimizer, self)
        if self._is_over:  # the hook stays until `remove`: torch, which goes through such hooks now, fails if one goes
            self._stop_noting()
        else:
            self._others.add(optimizer)
            self._losses.forget()  # those were its own


# -- what an optimizer trains -----------------------------------------------------------------------------------------


class FoundModel(NamedTuple):
    """A model, and how many of the optimizer's parameters it has."""

    model: nn.Module
    owned: int
    of: int


def find_model(optimizer: Any, modules: Iterable[nn.Module] | None = None) -> FoundModel:
    """Return the module that has the parameters of ``optimizer``.

    Recipe: ``find_model(optimizer).model``.

    Of the modules that have all of them, those with the fewest trained parameters are left, so that a module which
    holds two networks does not stand for one of them; of these the outermost is taken, which may be a wrapper. If none
    has all, the one that has the most counts, if that is more than half.

    Args:
        optimizer: Its parameters are looked for.
        modules: Where; every module that the garbage collector knows, if left out.

    Raises:
        NoMatchError: if no module has more than half of the parameters; the text says what was found.
    """
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if modules is None:
        # By type, not isinstance(), which asks proxies for their __class__ and so may load what they stand for.
        modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and "_parameters" in vars(one)]
    candidates = [_candidate(module, wanted) for module in modules]
    most = max((owned for _, owned, _ in candidates), default=0)
    if 2 * most <= len(wanted):
        raise NoMatchError(
            f"No module has the parameters of this {type(optimizer).__name__}: of {len(wanted)}, the best of "
            f"{len(candidates)} modules has {most}. Next: call hookline.follow(model, optimizer) in the script."
        )
    fewest = min(trained for _, owned, trained in candidates if owned == most)
    equal = [module for module, owned, trained in candidates if owned == most and trained == fewest]
    return FoundModel(_outermost(equal), most, len(wanted))


def find_optimizers(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the optimizers that are alive and train one of ``modules``, without wrappers."""
    found: dict[int, Any] = {}
    for one in gc.get_objects():
        if issubclass(type(one), Optimizer) and "param_groups" in vars(one):
            optimizer = unwrap_optimizer(one)
            with suppress(NoMatchError):
                find_model(optimizer, modules)
                found[id(optimizer)] = optimizer
    return list(found.values())


def find_scaler() -> Any:
    """Return the one ``GradScaler`` that is alive and switched on; None if there is none, or more than one."""
    scalers = [one for one in gc.get_objects() if issubclass(type(one), GradScaler) and one.is_enabled()]
    return scalers[0] if len(scalers) == 1 else None


def _candidate(module: nn.Module, wanted: set[int]) -> tuple[nn.Module, int, int]:
    """Return a module, how many of the `wanted` parameters it has, and how many that require gradients."""
    parameters = list(module.parameters())
    owned = sum(id(parameter) in wanted for parameter in parameters)
    return module, owned, sum(parameter.requires_grad for parameter in parameters)


def _outermost(modules: list[nn.Module]) -> nn.Module:
    """Return the module that contains the most of the others; of equal ones, the first."""
    among = {id(module) for module in modules}
    return max(modules, key=lambda module: sum(id(inner) in among for inner in module.modules()))
