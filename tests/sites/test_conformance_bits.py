"""What every kind of site promises about training: it ends with the same bits with observers and without.

One run has every observer of the library on; the control is a hook that draws one random number.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch
from helpers_training import nested_differences
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import AdamW
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint

import hookline as hl

STEP_KINDS = ["step_pre", "step_post"]


REGISTRATION = ["register_module", "register_parameter", "register_buffer"]


STEPS = 20


class Swish(torch.autograd.Function):
    """A function of one's own."""

    @staticmethod
    def forward(ctx, x):
        gate = torch.sigmoid(x)
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        return grad * (gate + x * gate * (1 - gate))


class House(nn.Module):
    """What makes observation hard: dropout, BatchNorm, ReLU in place, residuals, a reused and an own function."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.stem = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.3)
        self.mix = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.act(self.norm(self.stem(x)))
        if self.use_reentrant is None:
            return self.rest(x)
        return checkpoint(self.rest, x, use_reentrant=self.use_reentrant)

    def rest(self, x):
        x = self.drop(x)
        x = x + torch.tanh(self.mix(x)) * torch.softmax(x @ self.mix.weight, dim=-1)
        return self.head(self.drop(Swish.apply(x)))


class Run:
    """Twenty steps of AdamW; a subclass may hook whatever it likes."""

    def __init__(self, *, use_reentrant=None, steps=STEPS):
        self.steps = steps
        torch.manual_seed(0)
        random.seed(0)
        self.model = House(use_reentrant)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)

    def loss(self, batch, labels):
        return nn.functional.cross_entropy(self.model(batch), labels)

    def train(self):
        losses = []
        for _ in range(self.steps):
            batch, labels = torch.randn(12, 6), torch.randint(3, (12,))
            self.optimizer.zero_grad()
            loss = self.loss(batch, labels)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return {
            "losses": losses,
            "model": self.model.state_dict(),
            "grads": {name: parameter.grad for name, parameter in self.model.named_parameters()},
            "optimizer": self.optimizer.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
        }


@functools.cache
def plain(use_reentrant=None):
    """The run to compare with."""
    return Run(use_reentrant=use_reentrant).train()


class ObservedRun(Run):
    """The same with observers on modules, functions, tensors, leaves, nodes, saved tensors, the optimizer and more."""

    def __init__(self, *, observe=True, **options):
        super().__init__(**options)
        self.fired = {}
        self.observe = observe
        self.profiled = 0

    def observer(self, label, *, returns=True):
        """Reads whatever tensors it is shown; with observe=True, what it returns must not matter."""

        def read(*values):
            self.fired[label] = self.fired.get(label, 0) + 1
            total = 0.0
            for value in values:
                for item in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(item, torch.Tensor) and item.is_floating_point():
                        total += item.detach().double().abs().sum().item()
            return total

        def read_quietly(*values):
            read(*values)

        return read if returns and self.observe else read_quietly

    def hooks(self):
        model, optimizer = self.model, self.optimizer
        kinds = ("forward_pre", "forward", "backward_pre", "backward")
        for kind in kinds:
            yield hl.attach(model, "*", self.observer(f"module {kind}"), on=kind, observe=self.observe)
            for name, target, within in (
                ("functions", "*", model),
                ("aten.mm", "aten.mm", None),
                ("aten.mm in the model", "aten.mm", model),
                ("Swish", Swish, None),
            ):
                if target == "aten.mm" and "backward" in kind:
                    continue  # operators are below autograd
                hook = self.observer(f"{name} {kind}")
                yield hl.attach_function(target, hook, on=kind, within=within, observe=self.observe)
        yield hl.attach(model, "*", self.observer("param_grad"), on="param_grad")
        for parameter in model.parameters():
            yield hl.attach_tensor(parameter, self.observer("leaf grad"), observe=self.observe)
            yield hl.attach_node(parameter, self.observer("leaf node"), on="pre", observe=self.observe)
        yield hl.attach_tensor(list(model.parameters()), self.observer("all grads"))
        for kind in STEP_KINDS:
            yield hl.attach_optimizer(optimizer, self.observer(f"own {kind}", returns=False), on=kind)
            yield hl.attach_everywhere(self.observer(f"every {kind}", returns=False), on=kind)
        for kind in REGISTRATION:
            yield hl.attach(model, "*", self.observer(f"{kind} here"), on=kind, observe=self.observe)
            yield hl.attach_everywhere(self.observer(f"{kind} anywhere"), on=kind, observe=self.observe)
        yield hl.profile(model, functions="torch.nn.functional.*")

    def loss(self, batch, labels):
        hidden = []

        def keep(module, args, output):
            hidden.append(output)

        def pack(tensor):
            self.fired["pack"] = self.fired.get("pack", 0) + 1
            return tensor

        with (
            hl.saved_tensors(pack, lambda packed: packed) as scope,
            hl.attach(self.model, "stem", keep, observe=True),
        ):
            loss = super().loss(batch, labels)
        self.model.register_buffer("scratch", torch.zeros(1), persistent=False)
        hl.attach_tensor(hidden[0], self.observer("activation grad"), observe=self.observe)
        hl.attach_tensor([*hidden, loss], self.observer("activation and loss"))
        hl.attach_node(loss.grad_fn, self.observer("loss node pre"), on="pre", observe=self.observe)
        hl.attach_node(hidden[0].grad_fn, self.observer("activation node post"), on="post", observe=self.observe)
        assert scope.packed
        return loss

    def train(self):
        handles = list(self.hooks())
        try:
            return super().train()
        finally:
            for handle in reversed(handles):
                handle.remove()
            self.profiled = handles[-1].total.calls


@pytest.mark.parametrize("observe", [True, False], ids=["observe", "returns_nothing"])
def test_twenty_steps_with_every_observer_on_end_with_the_bits_of_the_plain_run(observe):
    """Losses, weights, buffers, gradients, AdamW's state and the random streams are identical; every observer fired."""
    observed = ObservedRun(observe=observe)
    found = nested_differences(observed.train(), plain())
    assert found == []
    once = ["activation grad", "loss node pre", "activation node post", "all grads"]
    once += [f"{who} {kind}" for who in ("own", "every") for kind in STEP_KINDS]
    once += [f"Swish {kind}" for kind in ("forward_pre", "forward", "backward_pre", "backward")]
    once += ["register_buffer here", "register_buffer anywhere"]
    assert {label: observed.fired.get(label) for label in once} == dict.fromkeys(once, STEPS)
    # As torch's own hook on several tensors does: the part that is checkpointed has a backward pass of its own.
    assert observed.fired["activation and loss"] == 2 * STEPS
    parameters = len(list(observed.model.parameters()))
    modules = len(list(observed.model.modules())) + 1  # drop is called twice
    for label in ("param_grad", "leaf grad", "leaf node"):
        assert observed.fired[label] == STEPS * parameters, label
    for kind in ("forward_pre", "forward", "backward_pre", "backward"):
        assert observed.fired[f"module {kind}"] == STEPS * modules, kind
        assert observed.fired[f"functions {kind}"] > STEPS * 8, kind
    for kind in ("forward_pre", "forward"):
        assert observed.fired[f"aten.mm in the model {kind}"] == STEPS * 2, kind
        assert observed.fired[f"aten.mm {kind}"] >= STEPS * 2, kind
    assert observed.fired["pack"] > STEPS * 10
    assert observed.profiled == STEPS


@pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_a_checkpointed_run_with_every_observer_on_ends_with_the_bits_of_the_plain_run(use_reentrant):
    """The same with most of the forward repeated in the backward, dropout and all."""
    observed = ObservedRun(use_reentrant=use_reentrant)
    found = nested_differences(observed.train(), plain(use_reentrant))
    assert found == []
    for label in ("param_grad", "leaf node", "Swish backward", "module backward", "functions backward", "pack"):
        assert observed.fired[label] >= STEPS, label


def test_after_a_run_with_every_observer_the_model_and_the_process_are_as_before():
    """No hook of anybody is left on model, optimizer, function class or in torch's global dictionaries."""
    observed, apply = ObservedRun(steps=2), Swish.apply
    observed.train()
    hl.assert_no_hooks(observed.model, foreign=True)
    assert "apply" not in vars(Swish)
    assert Swish.apply == apply
    for name, value in vars(observed.optimizer).items():
        assert "hooks" not in name or not value, name
    for parameter in observed.model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
    for name, value in [*vars(torch_module).items(), *vars(torch_optimizer).items()]:
        assert not (name.startswith("_global") and name.endswith("hooks")) or not value, name
    fired = dict(observed.fired)
    observed.model(torch.randn(12, 6)).sum().backward()
    observed.optimizer.step()
    assert observed.fired == fired


DRAWING = {
    "module": lambda run, draw: hl.attach(run.model, "stem", draw),
    "function": lambda run, draw: hl.attach_function(torch.tanh, draw, within=run.model),
    "aten.mm": lambda run, draw: hl.attach_function("aten.mm", draw, within=run.model),
    "own function": lambda run, draw: hl.attach_function(Swish, draw, on="backward"),
    "param_grad": lambda run, draw: hl.attach(run.model, "head.bias", draw, on="param_grad"),
    "tensor": lambda run, draw: hl.attach_tensor(run.model.head.weight, draw),
    "node": lambda run, draw: hl.attach_node(run.model.head.weight, draw),
    "optimizer": lambda run, draw: hl.attach_optimizer(run.optimizer, draw),
}


@pytest.mark.parametrize("put", DRAWING.values(), ids=DRAWING.keys())
def test_one_hook_that_draws_a_random_number_is_found_out(put):
    """The negative control: the comparison sees it in the random stream and in the weights, whatever drew."""

    def draw(*_):
        torch.rand(1)

    run = Run()
    with put(run, draw):
        drawn = run.train()
    found = nested_differences(drawn, plain())
    assert "/torch" in found
    assert "/model/stem.weight" in found


def test_one_pack_function_that_draws_a_random_number_is_found_out():
    """The same for saved tensors."""

    class Drawing(Run):
        def loss(self, batch, labels):
            with hl.saved_tensors(lambda tensor: torch.rand(1) is None or tensor, lambda packed: packed):
                return super().loss(batch, labels)

    found = nested_differences(Drawing().train(), plain())
    assert "/torch" in found
    assert "/model/stem.weight" in found
