"""Give an intervention its operations on a run: checkpoints in memory, gradients, training, perturbation, data.

The loops (training/run.py) make one for a firing with interventions, of a subclass that overrides `run_training_epoch`.
Other loops give their own to ``HookManager.fire(model_ctx=…)``. The manager (lifecycle/manager.py) saves and restores
the run by its `guard`, reads its `batch`, and passes it to ``InterventionHook.intervene``. analyses/interventions.py
and hooks of users call the operations, which docs/guard.md shows.

Each operation has to put back gradients and modes itself. What it changes on purpose (weights, optimizer) the `Guard`
around the hook undoes. Every generator comes from `private_generator` (guard/loaders.py): it draws from no stream of
the run, and gives the same numbers in an equal run. Tests: tests/guard/test_model_context.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import count
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from hookline.errors import LifecycleError, NoMatchError, OptionError
from hookline.guard.guard import Guard
from hookline.guard.loaders import copy_loader, private_generator
from hookline.guard.snapshot import ALL, Snapshot, roots_of
from hookline.messages import nearest_names
from hookline.phases import kept_modes
from hookline.sites import _torch
from hookline.sites.optimizers import unwrap_optimizer
from hookline.sites.wrappers import clean_modules

_PARAMETERS: Final = frozenset({"parameter"})
_Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]


class ModelDataContext:
    """A run, for an intervention to act on.

    Recipe::

        def intervene(self, run_ctx, model_ctx):
            token = model_ctx.save_checkpoint()
            before = model_ctx.compute_batch_gradients()
            model_ctx.apply_perturbation(before, -0.1)
            after = model_ctx.compute_batch_gradients()
            model_ctx.restore_checkpoint(token)
            return {"moved": float((after["0.weight"] - before["0.weight"]).norm())}

    Gradients and directions are dictionaries by the name of the parameter, without the prefixes of wrappers.
    ``loss_fn(model, batch)`` returns the loss; ``train_step(batch)`` is the run's own step, if it has one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        loss_fn: _Loss | None = None,
        batch: Any = None,
        pre_epoch: Snapshot | None = None,
        shuffled_loader: Callable[..., Any] | None = None,
        train_step: Callable[[Any], Any] | None = None,
        device: torch.device | str | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._scaler = scaler
        self._loader = loader
        self._loss_fn = loss_fn
        self._batch = batch
        self._pre_epoch = pre_epoch
        self._shuffled_loader = shuffled_loader
        self._train_step = train_step
        self._device = None if device is None else torch.device(device)
        self._given_guard = guard
        self._checkpoints: dict[str, Snapshot] = {}
        self._token_numbers = count()

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._model

    @property
    def device(self) -> torch.device:
        """The device of its first parameter; the CPU for a model without any."""
        if self._device is None:
            first = next(self._model.parameters(), None)
            self._device = torch.device("cpu") if first is None else first.device
        return self._device

    @property
    def batch(self) -> Any:
        """The batch of the step; None at a point that has none."""
        return self._batch

    @cached_property
    def guard(self) -> Guard:
        """The guard that undoes interventions; made here if none was given."""
        if self._given_guard is not None:
            return self._given_guard
        return Guard(self._model, self._optimizer, self._scheduler, self._scaler, loader=self._loader)

    @property
    def param_groups(self) -> tuple[Mapping[str, Any], ...]:
        """The optimizer's groups with their learning rates, to read."""
        groups = [] if self._optimizer is None else unwrap_optimizer(self._optimizer).param_groups
        return tuple(map(MappingProxyType, groups))

    def optimizer_state(self, name: str) -> Mapping[str, Any]:
        """Return what the optimizer keeps about the parameter ``name`` (``exp_avg``, …), to read; empty if nothing."""
        state = {} if self._optimizer is None else unwrap_optimizer(self._optimizer).state
        return MappingProxyType(state.get(self._parameters([name])[name], {}))

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the run as they were when the firing began; also those that the guard has parked.

        Parked: under the scope "grads" they are taken off the parameters, until the hook is over.
        """
        parked = self.guard.gradients
        found = {name: parked.get(p) if p.grad is None else p.grad for name, p in self._named.items()}
        return {name: grad for name, grad in found.items() if grad is not None}

    def batch_loss(self, batch: Any = None) -> Tensor:
        """Return the loss on one batch, in training mode and without gradients; modes stay as they are."""
        loss_fn, batch = self._loss_of("batch_loss"), self._batch_for(batch, "batch_loss")
        with self._training(), torch.no_grad():
            return loss_fn(self._model, batch).detach()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(self, full: bool = True) -> str:
        """Save the run in memory, and return a token to come back to it by, any number of times.

        ``full``: everything. Otherwise the parameters and random streams alone, for hooks that only perturb them.
        """
        roots = roots_of(self._model, self._optimizer, self._scheduler, self._scaler, self._loader)
        snapshot = Snapshot(roots)
        snapshot.take(ALL if full else _PARAMETERS, gradients=full)
        self._checkpoints[token := f"ckpt_{next(self._token_numbers)}"] = snapshot
        return token

    def restore_checkpoint(self, token: str) -> None:
        """Go back to what was saved under ``token``."""
        if token not in self._checkpoints:
            known = ", ".join(self._checkpoints) or "none"
            raise OptionError(f"Unknown checkpoint token: {token!r}. Saved and not discarded: {known}.")
        self._checkpoints[token].go_back(f"restore_checkpoint({token!r}): something since", versions=True)

    def discard_checkpoint(self, token: str) -> None:
        """Free its memory; nothing happens if it is gone already."""
        self._checkpoints.pop(token, None)

    def restore_pre_epoch(self) -> None:
        """Go back to before the epoch; gradients stay as they are.

        Random streams go back too, so that an epoch can be repeated bit by bit; `new_generator` gives other numbers.
        """
        if self._pre_epoch is None:
            raise LifecycleError(
                "restore_pre_epoch() goes back to before the epoch, and that was not saved. "
                "Next: set needs_pre_epoch_state = True on the hook, and take the epoch loop."
            )
        self._pre_epoch.go_back("restore_pre_epoch(): something since")

    # -- gradients -----------------------------------------------------------------------------------------------

    def compute_batch_gradients(self, batch: Any = None) -> dict[str, Tensor]:
        """Return the gradients of the loss on one batch, in training mode; ``.grad`` and modes stay as they are."""
        loss_fn, batch = self._loss_of("compute_batch_gradients"), self._batch_for(batch, "compute_batch_gradients")
        with self._training(), self._no_gradients():
            self._fill_gradients(loss_fn, batch)
            return self._collected()

    def compute_gradients(self) -> dict[str, Tensor]:
        """Return the mean gradients over the training data, without a step."""
        return self.run_training_epoch(self._loader, step=False)

    def run_training_epoch(self, loader: Iterable[Any] | None = None, step: bool = True) -> dict[str, Tensor]:
        """Go through a loader once, with an optimizer step after each batch or not; return the mean gradients.

        For the run's own loader (also if none is given) another one is made over the same data, in its order. The
        gradients are those left after each step: none, if a ``train_step`` of the run's own clears them at its end.
        """
        if loader is None or loader is self._loader:
            loader = copy_loader(self._loader, private_generator(self._model), shuffle=False)
        if step and self._optimizer is None and self._train_step is None:
            raise LifecycleError("run_training_epoch(step=True) needs an optimizer. Next: step=False, or pass one.")
        train = self._train_step if step else None
        if train is None:
            train = partial(self._step if step else self._fill_gradients, self._loss_of("run_training_epoch"))
        with self._training(), self._no_gradients():
            return self._mean_gradients(loader, train)

    def hvp(self, vector: Mapping[str, Tensor], batch: Any = None) -> dict[str, Tensor]:
        """Return the Hessian of the loss on a batch times a vector by names, those left out being zero."""
        from torch.nn.attention import SDPBackend, sdpa_kernel  # fused attention has no second derivative, MATH has

        loss_fn, batch = self._loss_of("hvp"), self._batch_for(batch, "hvp")
        trained = {name: p for name, p in self._named.items() if p.requires_grad}
        parameters = self._parameters(vector)
        direction = {name: self._fitting(vector[name].detach(), parameter) for name, parameter in parameters.items()}
        with self._training(), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            loss = _differentiable(loss_fn(self._model, batch))
            firsts = torch.autograd.grad(loss, list(trained.values()), create_graph=True, allow_unused=True)
            # A loss that is linear in a parameter has a gradient there that depends on nothing.
            pairs = [(g, direction[n]) for g, n in zip(firsts, trained, strict=True) if n in direction]
            slopes = [_dot(g, v) for g, v in pairs if g is not None and g.requires_grad]
            if not slopes:
                return {name: torch.zeros_like(p) for name, p in trained.items()}
            slope = sum(slopes[1:], start=slopes[0])
            seconds = torch.autograd.grad(slope, list(trained.values()), allow_unused=True)
        if all(second is None for second in seconds):
            raise LifecycleError(
                "hvp() differentiates the loss twice, and found a gradient that torch was told not to differentiate "
                "(once_differentiable, double backward). Next: a difference of gradients, compute_batch_gradients()."
            )
        return {n: torch.zeros_like(p) if h is None else h for (n, p), h in zip(trained.items(), seconds, strict=True)}

    def apply_perturbation(self, direction: Mapping[str, Tensor], scale: float) -> None:
        """Add a multiple of the direction to the parameters it names."""
        parameters = self._parameters(direction)
        steps = {name: self._fitting(direction[name], parameter) for name, parameter in parameters.items()}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.add_(steps[name], alpha=scale)

    def get_shuffled_loader(self) -> Any:
        """Return a loader of the training data in another order each time; no stream of the run is drawn from."""
        generator = private_generator(self._model)
        if self._shuffled_loader is not None:
            return self._shuffled_loader(generator)
        return copy_loader(self._loader, generator, shuffle=True)

    def new_generator(self) -> torch.Generator:
        """Return another generator at each call, the same ones in an equal run; no restore rewinds it."""
        return private_generator(self._model)

    @property
    def _named(self) -> dict[str, nn.Parameter]:
        """The parameters by name without prefixes of wrappers, shared ones once.

        Found anew at each call, since a hook may replace some.
        """
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for module_name, module in clean_modules(self._model):
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    named.setdefault(id(parameter), (f"{module_name}.{key}" if module_name else key, parameter))
        return dict(named.values())

    def _parameters(self, names: Iterable[str]) -> dict[str, nn.Parameter]:
        """Return the parameters of these names; all names of a shared one do, with or without prefixes of wrappers."""
        known = dict(self._model.named_parameters(remove_duplicate=False)) | self._named
        for name in names:
            if name not in known:
                near = ", ".join(map(repr, nearest_names(name, self._named)))
                raise NoMatchError(f"No parameter is called {name!r}; nearest: {near or 'there is none at all'}.")
        return {name: known[name] for name in names}

    def _fitting(self, step: Tensor, parameter: nn.Parameter) -> Tensor:
        if step.shape != parameter.shape:
            raise OptionError(
                f"A direction has the shape of its parameter, {tuple(parameter.shape)}; got {tuple(step.shape)}."
            )
        return step.to(parameter.device, parameter.dtype)

    def _loss_of(self, what: str) -> _Loss:
        if self._loss_fn is None:
            raise LifecycleError(f"{what}() requires a loss_fn. Next: give the experiment a loss_fn(model, batch).")
        return self._loss_fn

    def _batch_for(self, batch: Any, what: str) -> Any:
        batch = self._batch if batch is None else batch
        if batch is None:
            raise LifecycleError(f"{what}() requires a batch, and there is no current one here. Next: pass one.")
        return batch

    def _collected(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._named.items() if p.grad is not None}

    def _fill_gradients(self, loss_fn: _Loss, batch: Any) -> None:
        """Set ``.grad`` to the gradients of ``batch`` alone, unscaled."""
        scaler = self._backward(loss_fn, batch)
        scale = None if scaler is None else _torch.scale_of(scaler)
        if scale is not None:
            with torch.no_grad():
                for grad in (p.grad for p in self._model.parameters() if p.grad is not None):
                    grad.div_(scale.to(grad.device))

    def _step(self, loss_fn: _Loss, batch: Any) -> None:
        """Make an optimizer step on ``batch``; the scaler leaves it out where gradients are not finite."""
        scaler = self._backward(loss_fn, batch)
        if scaler is None:
            self._optimizer.step()
        else:
            scaler.unscale_(self._optimizer)
            scaler.step(self._optimizer)
            scaler.update()

    def _backward(self, loss_fn: _Loss, batch: Any) -> Any:
        """Set ``.grad`` to the gradients of ``batch`` alone, scaled if the run has a scaler; return the scaler."""
        scaler = self._scaler if self._scaler is not None and self._scaler.is_enabled() else None
        for parameter in self._model.parameters():
            parameter.grad = None
        loss = _differentiable(loss_fn(self._model, batch))
        (loss if scaler is None else scaler.scale(loss)).backward()
        return scaler

    def _mean_gradients(self, batches: Iterable[Any], step: Callable[[Any], Any]) -> dict[str, Tensor]:
        """Return the mean over the batches of the gradients after each ``step``."""
        totals, num_batches = dict[str, Tensor](), 0
        for batch in batches:
            step(batch)
            num_batches += 1
            with torch.no_grad():
                for name, grad in self._collected().items():
                    totals[name] = totals[name].add_(grad) if name in totals else grad.clone()
        if not num_batches:
            raise LifecycleError("There was no batch to go through: the loader is empty.")
        with torch.no_grad():
            return {name: total.div_(num_batches) for name, total in totals.items()}

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Set the model to training mode, and each module back to its own afterwards.

        A model in training mode stays as it is: a part of it in evaluation mode (frozen normalization) is intended.
        """
        with kept_modes(self._model), torch.enable_grad():
            if not self._model.training:
                self._model.train()
            yield

    @contextmanager
    def _no_gradients(self) -> Iterator[None]:
        """Take the gradients off the parameters, and put them, the same objects, back afterwards."""
        parked = [(parameter, parameter.grad) for parameter in self._model.parameters()]
        for parameter, _ in parked:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, grad in parked:
                parameter.grad = grad


def _dot(gradient: Tensor, direction: Tensor) -> Tensor:
    """Return the slope of the loss in a direction.

    A complex gradient of torch holds the slopes by the real and by the imaginary part; their products are added.
    """
    return (gradient.conj() * direction).real.sum() if gradient.is_complex() else (gradient * direction).sum()


def _differentiable(loss: Any) -> Tensor:
    """Return what a ``loss_fn`` returned; raise if it cannot be differentiated."""
    if not isinstance(loss, Tensor):
        raise LifecycleError(f"loss_fn(model, batch) returns a tensor to differentiate; got {type(loss).__name__}.")
    if not loss.requires_grad:
        raise LifecycleError(
            "The loss depends on no parameter that requires gradients, so it has none. Next: requires_grad_()."
        )
    return loss
