"""PyTorch's page on hooks, example by example: natively beside observers of ours, by ``hl.attach``, and as verbs."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from helpers_models import assert_same_grads, leaf, mlp, twin
from helpers_modules import assert_untouched
from torch import nn
from torch.nn.modules import module as torch_module

import hookline as hl

KINDS = {
    "register_forward_pre_hook": "forward_pre",
    "register_forward_hook": "forward",
    "register_full_backward_pre_hook": "backward_pre",
    "register_full_backward_hook": "backward",
}


class ResNet(nn.Module):
    """Stands in for torchvision's resnet50: the same names, three channels in, ten classes out."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.relu = nn.ReLU()
        self.layer3 = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.layer4 = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        x = self.layer4(self.layer3(self.relu(self.conv1(x))))
        return self.fc(x.mean((2, 3)))


class Classifier(nn.Module):
    """A model with a backbone and a head, and something before the backbone."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.backbone = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.backbone(torch.tanh(self.stem(x))))


def batch(*shape, requires_grad=False):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator, requires_grad=requires_grad)


@pytest.fixture(params=["native", "attach"])
def register(request):
    """Registers a hook as PyTorch's page does: natively beside observers of ours, or through ``hl.attach``.

    In the native form the test ends with the claim that ours fired beside torch's and left them alone.
    """
    beside = []

    def native(module, method, hook, **options):
        handle = getattr(module, method)(hook, **options)
        beside.append(hl.attach(module, lambda *_: None, on=KINDS[method]))
        for kind in KINDS.values():
            hl.attach(module, lambda *_: None, on=kind, observe=True)
        return handle

    def attach(module, method, hook, **options):
        return hl.attach(module, hook, on=KINDS[method], **options)

    torch.manual_seed(0)
    yield native if request.param == "native" else attach
    assert bool(beside) == (request.param == "native")
    for handle in beside:
        assert handle.report().fired > 0, handle


# -- hooks ------------------------------------------------------------------------------


def test_input_logger_hook(register, capsys):
    """Prints the input's shape before the forward, until the handle is removed."""
    model, x = nn.Linear(3, 2), batch(4, 3)

    def input_logger_hook(module, args):
        print(f"[{module.__class__.__name__}] Input shape: {args[0].shape}")
        return None

    handle = register(model, "register_forward_pre_hook", input_logger_hook)
    output = model(x)
    handle.remove()
    assert capsys.readouterr().out == "[Linear] Input shape: torch.Size([4, 3])\n"
    assert torch.equal(model(x), output)
    assert capsys.readouterr().out == ""


def test_execution_flow(register):
    """The sequence diagram, with torch's global hooks before the module's in every phase."""
    events = []

    class Noting(nn.Linear):
        def forward(self, x):
            events.append("forward()")
            return super().forward(x)

    model = Noting(3, 2)

    def note(label):
        return lambda *_: events.append(label)

    for method in ("register_forward_pre_hook", "register_forward_hook"):
        register(model, method, note(f"module {method}"))
    register(model, "register_full_backward_pre_hook", note("module register_full_backward_pre_hook"))
    register(model, "register_full_backward_hook", note("module register_full_backward_hook"))
    with (
        torch_module.register_module_forward_pre_hook(note("global forward pre")),
        torch_module.register_module_forward_hook(note("global forward")),
    ):
        model(batch(4, 3, requires_grad=True)).sum().backward()
    assert events == [
        "global forward pre",
        "module register_forward_pre_hook",
        "forward()",
        "global forward",
        "module register_forward_hook",
        "module register_full_backward_pre_hook",
        "module register_full_backward_hook",
    ]


# -- use cases -------------------------------------------------------------------------


def test_feature_extraction(register):
    """Intermediate features of two named layers, detached, as the model computed them."""
    features = {}

    def get_features(name):
        def hook(module, input, output):
            features[name] = output.detach()

        return hook

    model, input_tensor = ResNet().eval(), batch(2, 3, 8, 8, requires_grad=True)
    register(model.layer3, "register_forward_hook", get_features("layer3"))
    register(model.layer4, "register_forward_hook", get_features("layer4"))

    output = model(input_tensor)
    output.sum().backward()
    plain = ResNet().eval()
    plain.load_state_dict(model.state_dict())
    layer3 = plain.layer3(plain.relu(plain.conv1(input_tensor)))
    assert torch.equal(features["layer3"], layer3)
    assert torch.equal(features["layer4"], plain.layer4(layer3))
    assert torch.equal(plain(input_tensor), output)
    assert not features["layer4"].requires_grad


def test_gradient_clipping(register):
    """Every Linear passes on a gradient within ±1; its own parameters' are not bounded by this hook."""
    passed_on = []

    def gradient_clipping_hook(module, grad_input, grad_output):
        clipped = tuple(g.clamp(-1.0, 1.0) if g is not None else g for g in grad_input)
        passed_on.append(clipped[0])
        return clipped

    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), batch(5, 3, requires_grad=True)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            register(module, "register_full_backward_hook", gradient_clipping_hook)

    (model(x) * 100).sum().backward()
    unclipped = torch.full((5, 2), 100.0) @ model[2].weight
    assert unclipped.abs().max() > 1
    assert torch.equal(passed_on[0], unclipped.clamp(-1.0, 1.0))
    assert torch.equal(x.grad, passed_on[1])
    assert x.grad.abs().max() <= 1
    assert model[2].bias.grad.tolist() == [500.0, 500.0]


def test_freezing_by_zeroing(register):
    """Zeroing grad_output leaves the backbone without gradient, and with it everything before it."""

    def freeze_hook(module, grad_output):
        return tuple(torch.zeros_like(g) if g is not None else g for g in grad_output)

    model = Classifier()
    register(model.backbone, "register_full_backward_pre_hook", freeze_hook)
    model(batch(4, 3, requires_grad=True)).sum().backward()
    assert all(not parameter.grad.any() for parameter in model.backbone.parameters())
    assert all(parameter.grad.any() for parameter in model.head.parameters())
    assert all(not parameter.grad.any() for parameter in model.stem.parameters())


def test_activation_statistics(register, capsys):
    """One line of statistics per Conv2d and Linear, in the order of the forward."""

    def activation_stats_hook(module, input, output):
        if isinstance(output, torch.Tensor):
            print(
                f"[{module.__class__.__name__}] "
                f"mean={output.mean():.4f}, std={output.std():.4f}, "
                f"max={output.max():.4f}, min={output.min():.4f}"
            )

    model = ResNet().eval()
    for _name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            register(module, "register_forward_hook", activation_stats_hook)

    output = model(batch(2, 3, 8, 8, requires_grad=True))
    output.sum().backward()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("]")[0] for line in lines] == ["[Conv2d", "[Conv2d", "[Conv2d", "[Linear"]
    assert lines[-1] == (
        f"[Linear] mean={output.mean():.4f}, std={output.std():.4f}, max={output.max():.4f}, min={output.min():.4f}"
    )


def reference_grads(model, x, scale=100.0):
    clone, x = copy.deepcopy(model), twin(x)
    clone.zero_grad()
    (clone(x) * scale).sum().backward()
    return clone, x


def test_clipping_by_value_bounds_parameters_and_grad_input_of_the_named_module_alone():
    """Both .grad of its parameters and what it sends upstream are within ±value; later layers are untouched."""
    model, x = mlp(), leaf(4, 3)
    reference, _ = reference_grads(model, x)
    sent = []
    with hl.clip_gradients(model, "2", value=0.5):
        hl.attach(model, "2", lambda m, gi, go: sent.append(gi[0]), on="backward", observe=True)
        (model(x) * 100).sum().backward()
    assert torch.equal(model[2].weight.grad, reference[2].weight.grad.clamp(-0.5, 0.5))
    assert torch.equal(model[2].bias.grad, reference[2].bias.grad.clamp(-0.5, 0.5))
    unclipped = torch.full((4, 2), 100.0) @ model[2].weight
    assert unclipped.abs().max() > 0.5
    assert torch.equal(sent[0], unclipped.clamp(-0.5, 0.5))
    # The layer below gets the bounded gradient and is not bounded itself.
    hidden = model[1](model[0](x)).detach()
    expected = (unclipped.clamp(-0.5, 0.5) * (1 - hidden**2)).sum(0)
    torch.testing.assert_close(model[0].bias.grad, expected)


def test_clipping_by_norm_scales_what_is_above_and_leaves_the_rest_bit_identical():
    """A gradient above the norm is scaled down to it; one within it is not touched."""
    model, x = mlp(), leaf(4, 3)
    reference, x_reference = reference_grads(model, x)
    with hl.clip_gradients(model, "0", norm=1.0):
        (model(x) * 100).sum().backward()
    for parameter, before in zip(model[0].parameters(), reference[0].parameters(), strict=True):
        assert before.grad.norm() > 1
        torch.testing.assert_close(parameter.grad, before.grad / before.grad.norm())
    torch.testing.assert_close(x.grad, x_reference.grad / x_reference.grad.norm())
    for parameter, before in zip(model[2].parameters(), reference[2].parameters(), strict=True):
        assert torch.equal(parameter.grad, before.grad)
    model.zero_grad()
    x.grad = None
    reference, x_reference = reference_grads(model, x, scale=1e-3)
    with hl.clip_gradients(model, "0", norm=1.0):
        (model(x) * 1e-3).sum().backward()
    assert_same_grads(model, reference)
    assert torch.equal(x.grad, x_reference.grad)


@pytest.mark.parametrize("bounds", [{}, {"value": 1.0, "norm": 1.0}, {"value": 0.0}, {"norm": -1.0}], ids=repr)
def test_clipping_needs_one_positive_bound(bounds):
    """Neither, both, or a bound that is not positive: a ValueError, and nothing on the model."""
    model = mlp()
    with pytest.raises(ValueError, match="clip_gradients") as caught:
        hl.clip_gradients(model, "*", **bounds)
    assert isinstance(caught.value, hl.HooklineError)
    assert_untouched(model)


def test_clipping_is_all_or_nothing():
    """If a module cannot take the hook, the parameters of the others are not clipped either."""
    model, x = mlp(), leaf(4, 3)
    reference, _ = reference_grads(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)  # what torch 2.14 and later make of it
        model[1] = torch.jit.script(model[1])
    with pytest.raises(hl.errors.UnhookableError):
        hl.clip_gradients(model, ["0", "1"], value=1e-3)
    (model(x) * 100).sum().backward()
    assert_same_grads(model, reference)
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    ],
    ids=["sgd", "adamw"],
)
def test_freezing_keeps_the_named_parameters_and_leaves_gradients_upstream_alone(optimizer):
    """Through momentum and weight decay the frozen layer does not move, and all others get the same gradients."""
    model, x = mlp(), leaf(4, 3)
    reference, x_reference = copy.deepcopy(model), twin(x)
    stepper = optimizer(model.parameters())
    model(x).square().sum().backward()
    reference(x_reference).square().sum().backward()
    stepper.step()  # momentum is in place before the freeze
    reference.load_state_dict(model.state_dict())
    frozen = [parameter.detach().clone() for parameter in model[2].parameters()]
    with hl.freeze(model, "2"):
        stepper.step()
        assert all(torch.equal(p, old) for p, old in zip(model[2].parameters(), frozen, strict=True))
        reference.load_state_dict(model.state_dict())
        stepper.zero_grad()
        reference.zero_grad()
        x.grad = x_reference.grad = None
        model(x).square().sum().backward()
        reference(x_reference).square().sum().backward()
        assert all(parameter.grad is None for parameter in model[2].parameters())
        assert_same_grads(model[0], reference[0])
        assert torch.equal(x.grad, x_reference.grad)
        stepper.step()
    assert all(torch.equal(p, old) for p, old in zip(model[2].parameters(), frozen, strict=True))
    assert not torch.equal(model[0].weight, reference[0].weight)
    stepper.zero_grad()
    model(x).square().sum().backward()
    stepper.step()
    assert not torch.equal(model[2].weight, frozen[0])
