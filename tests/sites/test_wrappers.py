"""Wrapped models: names without the wrappers, raw names too, and hooks that sit on the modules inside."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_models import batch_for, make
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.optim.swa_utils import AveragedModel

import hookline as hl
from hookline.sites.wrappers import unwrap

Wrap = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    """Two layers, one of which happens to be called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(4, 4)
        self.module = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(self.mlp(x)).relu()


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.softmax(self.head(x), -1)


class MyParallel(nn.DataParallel):
    """A wrapper of the user's own."""


def parallel(model: nn.Module, kind: type[nn.DataParallel] = nn.DataParallel) -> nn.Module:
    """On the CPU, also where there is an accelerator."""
    wrapper = kind(model)
    wrapper.device_ids = []
    return wrapper.cpu()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def blockwise(wrap: Wrap) -> Wrap:
    """Wrap every block of a model, not the model."""

    def wrap_blocks(model: nn.Module) -> nn.Module:
        for index, block in enumerate(model.layers):
            model.layers[index] = wrap(block)
        return model

    return wrap_blocks


WRAPS: dict[str, Wrap] = {
    "compile": compiled,
    "DataParallel": lambda model: parallel(model),
    "subclass": lambda model: parallel(model, MyParallel),
    "AveragedModel": AveragedModel,
    "checkpoint": checkpoint_wrapper,
    "offload": offload_wrapper,
    "compile of DataParallel": lambda model: compiled(parallel(model)),
    "DataParallel of compile": lambda model: parallel(compiled(model)),
    "compiled blocks": blockwise(compiled),
    "checkpointed blocks": blockwise(checkpoint_wrapper),
    "compiled checkpointed blocks, averaged": lambda model: AveragedModel(
        blockwise(lambda block: compiled(checkpoint_wrapper(block)))(model)
    ),
}
ALL = ["", "layers", *(f"layers.{i}{end}" for i in (0, 1) for end in ("", ".mlp", ".module")), "head"]
X = torch.ones(3, 4)


def new() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(params=WRAPS, ids=str)
def wrapped(request) -> nn.Module:
    """The same model in one wrapping after the other."""
    torch.compiler.reset()
    return WRAPS[request.param](new())


def names(model: nn.Module, target: Any = "*", **options: Any) -> list[str]:
    return hl.find(model, target, **options).names


# -- names ---------------------------------------------------------------------------------------------------


def test_names_are_those_of_the_model_without_wrappers(wrapped):
    """Everywhere that names are given out: find, handles, sites, the table."""
    assert names(wrapped) == ALL
    assert "module.layers" not in repr(hl.find(wrapped))
    assert names(wrapped, "layers.#") == ["layers.0", "layers.1"]
    assert names(wrapped, nn.Linear) == [name for name in ALL if name.endswith(("mlp", "module", "head"))]
    with hl.attach(wrapped, "layers.#.module", lambda *args: None) as handle:
        assert handle.names == ("layers.0.module", "layers.1.module")
        assert [site.name for site in handle.report().sites] == list(handle.names)


def test_a_clean_name_means_the_module_inside(wrapped):
    """Never the wrapper, by name, glob, type or predicate."""
    assert [site.type for site in hl.find(wrapped, ["", "layers.0"])] == ["Net", "Block"]
    assert [site.type for site in hl.find(wrapped, nn.Module)][:3] == ["Net", "ModuleList", "Block"]
    asked: list[str] = []
    hl.find(wrapped, lambda name, module: asked.append(type(module).__name__) or not name)
    assert set(asked) == {"Net", "ModuleList", "Block", "Linear"}


def test_hooks_fire_inside_and_know_step_and_name(wrapped):
    """The whole model, a block and a layer, in two forwards."""
    seen: list[tuple[str, str, int]] = []

    def note(module: nn.Module, args: Any, output: Any, *, site: hl.Site) -> None:
        seen.append((site.name, type(module).__name__, site.step))

    handles = hl.HandleSet([hl.attach(wrapped, note), hl.attach(wrapped, ["layers.1", "layers.0.mlp"], note)])
    with handles, torch.no_grad():
        wrapped(X)
        wrapped(X)
    one = [("layers.0.mlp", "Linear"), ("layers.1", "Block"), ("", "Net")]
    assert seen == [(*place, step) for step in (0, 1) for place in one]
    hl.assert_no_hooks(wrapped)


def test_every_way_to_call_the_model_is_a_step():
    """The wrapper or what is inside: the hook fires and the step is counted."""
    inner = new()
    model = parallel(compiled(inner))
    with hl.attach(model, lambda *args: None) as handle:
        for way in (model, model.module, inner):
            way(X)
        assert (handle.report().fired, handle.report().last_step) == (3, 2)
        assert hl.attached(inner) == hl.attached(model) == [handle]


@pytest.mark.parametrize(
    ("wrap", "target", "found"),
    [
        ("compile", "_orig_mod.layers.0", ["layers.0"]),
        ("compile", "_orig_mod", [""]),
        ("compile", "_orig_mod.layers.#.mlp", ["layers.0.mlp", "layers.1.mlp"]),
        ("compile", re.compile(r"_orig_mod\.layers\.\d"), ["layers.0", "layers.1"]),
        ("DataParallel", "module.layers.#", ["layers.0", "layers.1"]),
        ("DataParallel", "module.layers.0.module", ["layers.0.module"]),
        ("DataParallel", "module", [""]),
        ("compile of DataParallel", "_orig_mod.module.head", ["head"]),
        ("compile of DataParallel", "_orig_mod.head", ["head"]),
        ("compile of DataParallel", "module.head", ["head"]),
        ("DataParallel of compile", "module._orig_mod.head", ["head"]),
        ("compiled blocks", "layers.0._orig_mod.mlp", ["layers.0.mlp"]),
        ("compiled blocks", "layers.#._orig_mod", ["layers.0", "layers.1"]),
        ("checkpointed blocks", "layers.0._checkpoint_wrapped_module.mlp", ["layers.0.mlp"]),
        (
            "compiled checkpointed blocks, averaged",
            "module.layers.#._checkpoint_wrapped_module.mlp",
            ["layers.0.mlp", "layers.1.mlp"],
        ),
    ],
    ids=str,
)
def test_raw_names_with_some_or_all_of_the_prefixes_are_taken_too(wrap, target, found):
    """As exact names, globs and regular expressions; what they select has its clean name."""
    assert names(WRAPS[wrap](new()), target) == found


def test_an_attribute_called_like_a_prefix_is_no_wrapper():
    """The type of the parent decides, not the name."""

    class DataParallel(nn.Module):  # not torch's
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)
            self._orig_mod = nn.Linear(2, 2)
            self.base_model = nn.Sequential(nn.ReLU())

    assert names(DataParallel()) == ["", "module", "_orig_mod", "base_model", "base_model.0"]
    assert unwrap(DataParallel()).__class__ is DataParallel


# -- within, everywhere --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks:UserWarning")
@pytest.mark.parametrize("wrap", ["DataParallel", "checkpointed blocks", "compile of DataParallel", "compiled blocks"])
def test_everywhere_names_modules_cleanly_and_leaves_wrappers_out(wrap):
    """Each module once per forward."""
    torch.compiler.reset()
    wrapped, seen = WRAPS[wrap](new()), []

    def note(module: nn.Module, args: Any, output: Any, *, site: hl.Site) -> None:
        seen.append(site.name)

    with hl.attach_everywhere(note) as handle, torch.no_grad():
        wrapped(X)
        wrapped(X)
        handle.remove(quiet=True)
    order = ["layers.0.mlp", "layers.0.module", "layers.0", "layers.1.mlp", "layers.1.module", "layers.1", "head", ""]
    assert seen == order * 2


# -- parameters ----------------------------------------------------------------------------------------------


def test_parameters_have_clean_names(wrapped):
    """By clean and by raw names, globs, modules and types."""
    raw = next(
        name for name, _ in wrapped.named_parameters() if name.endswith("layers.0.mlp.weight") or ".mlp.w" in name
    )

    def of(target: Any, **options: Any) -> list[str]:
        with hl.attach(wrapped, target, lambda p: None, on="param_grad", **options) as handle:
            return list(handle.names)

    assert of("layers.0.mlp.weight") == of(raw) == ["layers.0.mlp.weight"]
    assert of("layers.#.mlp.bias") == ["layers.0.mlp.bias", "layers.1.mlp.bias"]
    assert of("head") == ["head.weight", "head.bias"]
    assert of(Block, exclude=["*.bias", "layers.1"]) == ["layers.0.mlp.weight", "layers.0.module.weight"]
    assert len(of(None)) == len(of("*")) == len(list(wrapped.parameters()))
    with pytest.raises(hl.errors.NoMatchError, match=r"in this Net; nearest: 'layers\.0\.mlp\.weight'"):
        of("layers.0.mlp.wieght")


def renew(model: Net) -> None:
    model.head.weight = nn.Parameter(torch.ones(2, 4))


def assign(model: Net) -> None:
    model.load_state_dict(new().state_dict(), assign=True)


@pytest.mark.parametrize("replace", [renew, assign])
def test_a_hook_follows_a_parameter_that_was_replaced(replace):
    """From the next forward on it fires for the new one, and not for the old."""
    model, seen = new(), []
    handle = hl.attach(model, "head.weight", seen.append, on="param_grad")
    old = model.head.weight
    model(X)[0, 0].backward()
    replace(model)
    for _ in range(2):
        model(X)[0, 0].backward()
    old.sum().backward()
    assert [parameter is model.head.weight for parameter in seen] == [False, True, True]
    assert not old._post_accumulate_grad_hooks
    assert (handle.report().matched, handle.report().attached, handle.report().fired) == (1, 1, 3)
    handle.remove()
    hl.assert_no_hooks(model, foreign=True)
    model(X)[0, 0].backward()
    assert len(seen) == 3


# -- TorchScript ---------------------------------------------------------------------------------------------


def script(module: nn.Module) -> nn.Module:
    return torch.jit.script(module)


def trace(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, X)


def freeze(module: nn.Module) -> nn.Module:
    return torch.jit.freeze(torch.jit.script(module.eval()))


@pytest.fixture(params=[script, trace, freeze])
def scripted(request) -> nn.Sequential:
    """A plain layer, a TorchScript module, a plain layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        inner = request.param(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    return nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 2))


@pytest.mark.parametrize("target", ["1", "*", nn.Module])
def test_a_script_module_is_refused(scripted, target):
    """By name or among others; nothing is attached, and the others are hooked without it."""
    with pytest.raises(hl.errors.UnhookableError, match="TorchScript does not run Python hooks"):
        hl.attach(scripted, target, lambda *args: None)
    hl.assert_no_hooks(scripted)
    assert hl.attach(scripted, "*", lambda *args: None, exclude="1*").names == ("", "0", "2")


# -- PEFT ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peft() -> Any:
    """The package; it takes seconds to import, so only where it is needed."""
    return pytest.importorskip("peft")


@pytest.fixture
def lora(peft) -> nn.Module:
    """A random GPT-2 with LoRA on its attention."""
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(make("gpt2"), config)


def test_peft_names_are_those_of_the_model(peft, lora):
    """Without ``base_model.model``; its layers are modules like any other."""
    found = hl.find(lora)
    assert found.names[:3] == ["", "transformer", "transformer.wte"]
    assert not [name for name in found.names if name.startswith(("base_model", "model"))]
    assert names(lora, "transformer.h.#") == [f"transformer.h.{i}" for i in range(3)]
    assert names(lora, "base_model.model.transformer.h.#") == names(lora, "transformer.h.#")
    assert names(lora, "base_model.transformer.h.0") == ["transformer.h.0"]
    for end in ("", ".base_layer", ".lora_A.default"):
        assert names(lora, f"*.1.attn.c_attn{end}") == [f"transformer.h.1.attn.c_attn{end}"]


def test_peft_training_and_generation_both_fire(lora):
    """Through the PEFT model and past it: one step each forward, adapters' gradients under clean names."""
    seen: list[str] = []
    with (
        hl.attach(lora, lambda *args: None) as whole,
        hl.attach(lora, "*.c_attn", lambda *args: None) as layers,
        hl.attach(lora, "*.lora_?.*", lambda p, *, site: seen.append(site.name), on="param_grad"),
    ):
        lora(**batch_for("gpt2")).loss.backward()
        lora.generate(input_ids=torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False)
        assert (whole.report().fired, whole.report().last_step) == (3, 2)
        assert layers.report().fired == 9
    assert sorted(seen) == [
        f"transformer.h.{i}.attn.c_attn.lora_{part}.default.weight" for i in range(3) for part in "AB"
    ]
