"""PyTorch's page on hooks, example by example: natively beside observers of ours, and through ``hl.attach``."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

import hookline as hl

KINDS = {
    "register_forward_pre_hook": "forward_pre",
    "register_forward_hook": "forward",
    "register_full_backward_pre_hook": "backward_pre",
    "register_full_backward_hook": "backward",
    "register_state_dict_pre_hook": "state_dict_pre",
    "register_state_dict_post_hook": "state_dict_post",
    "register_load_state_dict_pre_hook": "load_state_dict_pre",
    "register_load_state_dict_post_hook": "load_state_dict_post",
}


OBSERVED = ("forward_pre", "forward", "backward_pre", "backward")


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
        own = KINDS[method]
        ours = {"always_call": options.get("always_call", False), "observe": True} if own == "forward" else {}
        beside.append(hl.attach(module, lambda *_: None, on=own, **ours))
        for kind in OBSERVED if own in OBSERVED else ():
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


def test_forward_pre_hook_options(register):
    """prepend=True goes first, with_kwargs=True is called with kwargs and may return both."""
    events = []

    class Scale(nn.Module):
        def forward(self, x, *, by):
            return x * by

    def doubled(module, args, kwargs):
        events.append("second")
        return args, {"by": kwargs["by"] * 2}

    model = Scale()
    register(model, "register_forward_pre_hook", doubled, with_kwargs=True)
    register(model, "register_forward_pre_hook", lambda module, args: events.append("first"), prepend=True)
    assert torch.equal(model(torch.ones(2), by=3.0), torch.full((2,), 6.0))
    assert events == ["first", "second"]


def test_always_call(register):
    """With always_call=True the forward hook runs although the forward raises, for cleaning up."""
    open_resources = ["resource"]

    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError("forward failed")

    def cleanup(module, args, output):
        assert output is None
        open_resources.clear()

    model = Failing()
    register(model, "register_forward_hook", cleanup, always_call=True)
    with pytest.raises(ValueError, match="forward failed"):
        model(batch(2))
    assert open_resources == []


def test_backward_hooks_edit_gradients(register):
    """The pre hook changes the incoming gradient, the hook what is passed on."""
    model, x = nn.Linear(3, 2), batch(4, 3, requires_grad=True)
    register(model, "register_full_backward_pre_hook", lambda module, grad_output: (grad_output[0] * 2,))
    register(model, "register_full_backward_hook", lambda module, gi, go: (gi[0] * 4,))
    model(x).sum().backward()
    assert torch.equal(x.grad, torch.full((4, 2), 2.0) @ model.weight * 4)
    assert torch.equal(model.bias.grad, torch.full((2,), 8.0))


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


GLOBALS = {
    "register_module_forward_pre_hook": "forward_pre",
    "register_module_forward_hook": "forward",
    "register_module_full_backward_pre_hook": "backward_pre",
    "register_module_full_backward_hook": "backward",
}


@pytest.mark.parametrize("form", ["native", "attach"])
def test_global_hooks(form):
    """Each of the four global registrations reaches every module, before the module's own hooks."""
    model, events = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), []

    def note(label):
        return lambda module, *_: events.append(f"{label} {type(module).__name__}")

    for kind in GLOBALS.values():
        hl.attach(model[0], note(f"local {kind}"), on=kind)
    handles = []
    for method, kind in GLOBALS.items():
        hook = note(f"global {kind}")
        native = getattr(torch_module, method)
        handles.append(native(hook) if form == "native" else hl.attach_everywhere(hook, on=kind))
    model(batch(2, 3, requires_grad=True)).sum().backward()
    for handle in handles:
        handle.remove()
    for kind in GLOBALS.values():
        fired = [event for event in events if f" {kind} " in event]
        assert sorted(fired) == sorted(
            [f"global {kind} {name}" for name in ("Sequential", "Linear", "Tanh")] + [f"local {kind} Linear"]
        )
    linear = [event for event in events if event.endswith("Linear")]
    assert linear[:4] == [
        "global forward_pre Linear",
        "local forward_pre Linear",
        "global forward Linear",
        "local forward Linear",
    ]
    if form == "attach":
        assert linear[4:] == [
            "global backward_pre Linear",
            "local backward_pre Linear",
            "global backward Linear",
            "local backward Linear",
        ]
    events.clear()
    model(batch(2, 3))
    assert events == ["local forward_pre Linear", "local forward Linear"]


def test_state_dict_hooks(register):
    """The four registrations with their documented signatures, on saving and on loading."""
    model, calls = nn.Linear(3, 2), []

    def pre(module, prefix, keep_vars):
        calls.append(("pre", prefix, keep_vars))

    def post(module, destination, prefix, local_metadata):
        calls.append(("post", sorted(destination), prefix))
        destination["note"] = torch.ones(1)

    def load_pre(module, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        calls.append(("load_pre", sorted(state_dict), prefix, strict))
        del state_dict["note"]

    def load_post(module, incompatible_keys):
        calls.append(("load_post", list(incompatible_keys.missing_keys)))

    register(model, "register_state_dict_pre_hook", pre)
    register(model, "register_state_dict_post_hook", post)
    register(model, "register_load_state_dict_pre_hook", load_pre)
    register(model, "register_load_state_dict_post_hook", load_post)
    model.load_state_dict(model.state_dict())
    assert calls == [
        ("pre", "", False),
        ("post", ["bias", "weight"], ""),
        ("load_pre", ["bias", "note", "weight"], "", True),
        ("load_post", []),
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


def test_gradient_clipping_by_torchs_own_full_backward_kind():
    """Clipping with on="full_backward": the same gradients as natively, by type instead of by loop."""

    def gradient_clipping_hook(module, grad_input, grad_output):
        return tuple(g.clamp(-1.0, 1.0) if g is not None else g for g in grad_input)

    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    native = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    native.load_state_dict(ours.state_dict())
    hl.attach(ours, nn.Linear, gradient_clipping_hook, on="full_backward")
    for module in native.modules():
        if isinstance(module, nn.Linear):
            module.register_full_backward_hook(gradient_clipping_hook)
    inputs = [batch(5, 3, requires_grad=True) for _ in range(2)]
    for model, x in zip((ours, native), inputs, strict=True):
        (model(x) * 100).sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for mine, theirs in zip(ours.parameters(), native.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


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


def test_removable_handle(register):
    """Every registration returns a RemovableHandle whose remove() takes the hook off."""
    model, x, events = nn.Linear(3, 2), batch(4, 3), []

    def my_hook(module, args, output):
        events.append("fired")

    handle = register(model, "register_forward_hook", my_hook)
    assert isinstance(handle, RemovableHandle)
    model(x)
    handle.remove()
    model(x)
    assert events == ["fired"]


def test_handle_as_a_context_manager(register):
    """Inside the with block the hook is on, after it it is gone."""
    model, x, events = nn.Linear(3, 2), batch(4, 3), []

    def my_hook(module, args, output):
        events.append("fired")

    with register(model, "register_forward_hook", my_hook):
        model(x)
    model(x)
    assert events == ["fired"]


def test_fast_path(register):
    """With every hook removed the model is back on torch's fast path: all eight dictionaries are empty."""
    model, x = nn.Linear(3, 2), batch(4, 3, requires_grad=True)
    handles = [
        register(model, "register_forward_pre_hook", lambda module, args: None),
        register(model, "register_forward_hook", lambda module, args, output: None),
        register(model, "register_full_backward_pre_hook", lambda module, grad_output: None),
        register(model, "register_full_backward_hook", lambda module, grad_input, grad_output: None),
    ]
    model(x).sum().backward()
    for handle in [*handles, *hl.attached(model)]:
        handle.remove()
    local = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
    assert not any(getattr(model, name) for name in local)
    assert not any(getattr(torch_module, f"_global{name}") for name in local)
