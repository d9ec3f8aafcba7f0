"""Hooks of every kind on every module of real Hugging Face classes, against references in plain torch.

The reference is a twin model with the same weights, on which torch's own hooks count the forwards, and an alias
behind every output collects the gradient that its users send back.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers_models import MODELS, batch_for, loss_of, make, twin_of
from torch import Tensor, nn

import hookline as hl

RUN_KINDS = ("forward_pre", "forward", "backward_pre", "backward", "full_backward")
STATE_KINDS = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")

every_model = pytest.mark.parametrize("name", MODELS)
in_both_modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
# torch's own full backward hooks complain about ModelOutputs and about inputs without gradients.
ignores_torch_complaints = pytest.mark.filterwarnings(
    "ignore:For backward hooks to be called:UserWarning", "ignore:Full backward hook is firing:UserWarning"
)


# -- fire counts -------------------------------------------------------------------------------------------


@every_model
@in_both_modes
@ignores_torch_complaints
def test_hooks_of_every_kind_fire_on_every_module_as_often_as_the_references_say(name: str, training: bool) -> None:
    """A training step, a save and a load fire each of nine kinds on each module as often as in plain torch."""
    model = make(name).train(training)
    expected = {
        **torch_counts(twin_of(name, model).train(training), name),
        **dict.fromkeys(("backward_pre", "backward"), gradient_counts(name, model, training)),
    }
    seen: dict[str, Counter[str]] = {kind: Counter() for kind in (*RUN_KINDS, *STATE_KINDS)}
    handles = {kind: hl.attach(model, "*", counting_hook(kind, count), on=kind) for kind, count in seen.items()}
    step(model, name)
    model.load_state_dict(model.state_dict())
    for kind, handle in handles.items():
        report = handle.report()
        assert seen[kind] == expected[kind], kind
        assert {site.name: site.fired for site in report.sites if site.fired} == expected[kind], kind
        assert report.matched == len(list(model.modules()))
        remove_and_check_warning(handle, model, expected[kind])
    assert sum(expected["backward"].values()) > len(expected["forward"]) / 2
    assert set(expected["state_dict_pre"]) == {module_name for module_name, _ in model.named_modules()}


# -- values ------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize(
    ("training", "observe"),
    [(False, False), (True, False), (True, True)],
    ids=["eval-plain", "train-plain", "train-observe"],
)
def test_grad_outputs_are_exactly_the_gradients_that_users_send_back(name: str, training: bool, observe: bool) -> None:
    """Each backward_pre hook gets, output by output, the very gradient that an alias on the twin collects."""
    model = make(name).train(training)
    twin = twin_of(name, model).train(training)
    expected = gradients_by_alias(twin, name)
    seen: Gradients = {}

    def hook(module: nn.Module, grad_output: Any, *, site: hl.Site) -> None:
        seen[site.name, site.call] = by_path(site.outputs, grad_output)

    handle = hl.attach(model, "*", hook, on="backward_pre", observe=observe)
    step(model, name)
    assert_same_gradients(seen, expected)
    assert_same_gradients({("", 0): parameter_gradients(model)}, {("", 0): parameter_gradients(twin)})
    remove_and_check_warning(handle, model, {module_name for module_name, _ in expected})


@every_model
@pytest.mark.parametrize("style", ["plain", "observe", "lambda"])
def test_grad_inputs_of_leaf_modules_equal_an_isolated_recomputation(name: str, style: str) -> None:
    """Each linear and normalising layer reports its own share, as autograd gives it for that layer alone."""
    model = make(name)
    affine = {module_name: module for module_name, module in model.named_modules() if is_affine(module_name, module)}
    calls = watch_calls(model, list(affine.values()), name, style)
    checked = [check_grad_input(module, calls[module_name, 0]) for module_name, module in affine.items()]
    assert len(checked) >= 4
    assert set(checked) == {1}


# -- helpers -----------------------------------------------------------------------------------------------

Gradients = dict[tuple[str, int], dict[str, Tensor]]
"""By module name and call index: the gradient of each output, by its path in the output."""


def step(model: nn.Module, name: str) -> None:
    """One forward and backward, dropout included the same each time."""
    torch.manual_seed(1)
    loss_of(model(**batch_for(name))).backward()


def counting_hook(kind: str, count: Counter[str]) -> Callable[..., None]:
    """A hook of that kind that returns nothing and counts its firings by module name."""

    def hook(*args: Any, site: hl.Site) -> None:
        assert site.kind == kind
        count[site.name] += 1

    return hook


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors inside an output, each with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict | tuple | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{path}.{key}" if path else str(key))


def swapped(value: Any, swap: Callable[[Tensor], Tensor]) -> Any:
    """The same output with other tensors."""
    if isinstance(value, Tensor):
        return swap(value)
    if isinstance(value, dict):
        return type(value)(**{key: swapped(item, swap) for key, item in value.items()})
    if isinstance(value, tuple | list):
        return type(value)(swapped(item, swap) for item in value)
    return value


def by_path(paths: tuple[str, ...], gradients: tuple[Tensor | None, ...]) -> dict[str, Tensor]:
    """The gradients that came, by path."""
    pairs = zip(paths, gradients, strict=True)
    return {path: gradient.clone() for path, gradient in pairs if gradient is not None}


def gradients_by_alias(twin: nn.Module, name: str) -> Gradients:
    """The reference: every output handed on as an alias, whose gradient is what the output's users send back."""
    found: Gradients = {}
    calls: Counter[str] = Counter()

    def hand_on_aliases(module_name: str, output: Any) -> Any:
        call, aliases = calls[module_name], {}
        calls[module_name] += 1
        for path, tensor in leaves(output):
            if tensor.requires_grad and id(tensor) not in aliases:
                aliases[id(tensor)] = alias = tensor.view_as(tensor)
                alias.register_hook(
                    lambda gradient, path=path: found.setdefault((module_name, call), {}).update({path: gradient})
                )
        return swapped(output, lambda tensor: aliases.get(id(tensor), tensor))

    for module_name, module in twin.named_modules():
        module.register_forward_hook(lambda module, args, output, name=module_name: hand_on_aliases(name, output))
    step(twin, name)
    return found


def gradient_counts(name: str, model: nn.Module, training: bool) -> Counter[str]:
    """How many calls of each module got a gradient."""
    return Counter(module for module, _ in gradients_by_alias(twin_of(name, model).train(training), name))


def torch_counts(twin: nn.Module, name: str) -> dict[str, Counter[str]]:
    """How often torch's own hooks fire per module, for every kind that torch has rightly."""
    register = {
        "forward_pre": nn.Module.register_forward_pre_hook,
        "forward": nn.Module.register_forward_hook,
        "full_backward": nn.Module.register_full_backward_hook,
        "state_dict_pre": nn.Module.register_state_dict_pre_hook,
        "state_dict_post": nn.Module.register_state_dict_post_hook,
        "load_state_dict_pre": nn.Module.register_load_state_dict_pre_hook,
        "load_state_dict_post": nn.Module.register_load_state_dict_post_hook,
    }
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in register}
    for kind, register_on in register.items():
        for module_name, module in twin.named_modules():
            register_on(module, lambda *_, name=module_name, kind=kind: counts[kind].update([name]))
    step(twin, name)
    twin.load_state_dict(twin.state_dict())
    return counts


def assert_same_gradients(seen: Gradients, expected: Gradients) -> None:
    """The same calls, the same outputs of each, the same values."""
    assert {key: set(value) for key, value in seen.items()} == {key: set(v) for key, v in expected.items()}
    assert seen
    pairs = {(*key, path): (seen[key][path], expected[key][path]) for key in seen for path in seen[key]}
    assert [where for where, (ours, theirs) in pairs.items() if not torch.equal(ours, theirs)] == []


def parameter_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of those parameters that have one."""
    return {key: value.grad for key, value in model.named_parameters() if value.grad is not None}


def is_affine(name: str, module: nn.Module) -> bool:
    """A linear or normalising layer, whoever wrote it, but for Mamba's dt_proj, which is never called."""
    kind = type(module).__name__
    return kind.endswith(("Linear", "Conv1D", "LayerNorm", "RMSNorm")) and not name.endswith("dt_proj")


def watch_calls(
    model: nn.Module, modules: list[nn.Module], name: str, style: str
) -> dict[tuple[str, int], dict[str, Any]]:
    """One step with the calls of those modules written down: arguments, grad_input, grad_output."""
    calls: dict[tuple[str, int], dict[str, Any]] = {}

    def before(module: nn.Module, args: Any, kwargs: Any, *, site: hl.Site) -> None:
        calls[site.name, site.call] = {"args": frozen(args), "kwargs": frozen(kwargs)}

    def after(module: nn.Module, grad_input: Any, grad_output: Any, *, site: hl.Site) -> None:
        calls[site.name, site.call] |= {
            "grad_input": by_path(site.inputs, grad_input),
            "grad_output": by_path(site.outputs, grad_output),
        }

    hook = after if style != "lambda" else lambda *args, site: after(*args, site=site)
    with (
        hl.attach(model, modules, before, on="forward_pre", with_kwargs=True, observe=True),
        hl.attach(model, modules, hook, on="backward", observe=style == "observe"),
    ):
        # A cache would be written to once more in the recomputation.
        cache = {"use_cache": False} if name in ("gpt2", "llama", "t5", "mamba") else {}
        loss_of(model(**batch_for(name), **cache)).backward()
    return calls


def frozen(value: Any) -> Any:
    """Arguments whose tensors are copies, cut off from the graph, that want a gradient if the originals did."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return tuple(frozen(item) for item in value) if isinstance(value, tuple | list) else value


def check_grad_input(module: nn.Module, call: dict[str, Any]) -> int:
    """Compare grad_input with what autograd gives for this module alone; how many gradients there were."""
    inputs = {path: t for path, t in leaves((*call["args"], call["kwargs"])) if t.requires_grad}
    keyword = f"{len(call['args'])}."
    inputs = {path.removeprefix(keyword): tensor for path, tensor in inputs.items()}
    outputs = dict(leaves(module(*call["args"], **call["kwargs"])))
    expected = torch.autograd.grad(
        [outputs[path] for path in call["grad_output"]],
        list(inputs.values()),
        list(call["grad_output"].values()),
        allow_unused=True,
    )
    wanted = {path: grad for path, grad in zip(inputs, expected, strict=True) if grad is not None}
    assert call["grad_input"].keys() == wanted.keys()
    for path, gradient in wanted.items():
        torch.testing.assert_close(call["grad_input"][path], gradient, rtol=1e-5, atol=1e-8)
    return len(wanted)


def remove_and_check_warning(handle: hl.HookHandle, model: nn.Module, fired: Any) -> None:
    """Remove a hook from "*"; the warning names the modules where it did not fire, but for containers."""
    modules = dict(model.named_modules())
    silent = {name for name in modules if name not in fired}
    assert set(handle.report().silent) == silent
    expected = {name for name in silent if not isinstance(modules[name], nn.ModuleList)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle.remove()
    if not expected or handle.report().kind in STATE_KINDS:
        assert [str(warning.message) for warning in caught] == []
        return
    assert [warning.category for warning in caught] == [hl.errors.HookNeverFired]
    count, reasons = re.search(r"never fired on (\d+) of .*? ran\. (.*)", str(caught[0].message)).groups()  # type: ignore[union-attr]
    named = {name for name in re.findall(r"'([\w.]*)'", reasons) if name in modules}
    left_out = sum(int(more) for more in re.findall(r"and (\d+) more", reasons))
    assert named <= expected
    assert int(count) == len(expected) == len(named) + left_out
