"""What the doctor says of a model: whose hooks, where none fires."""

from __future__ import annotations

import functools
import json

import pytest
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune

import hookline as hl
from hookline.cli.main import main
from hookline.debug import doctor


class Net(nn.Module):
    """One module of each sort: called, used by its weights, called by ``forward()``, never called, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.body = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.borrowed = nn.Linear(4, 4)
        self.direct = nn.Linear(4, 4)
        self.unused = nn.Linear(1, 1)
        self.layers = nn.ModuleList([nn.BatchNorm1d(3)])
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(x, x, x)[0] + self.body(x)
        x = self.tied(x) @ self.tied.weight
        x = F.linear(x, self.borrowed.weight)
        out: Tensor = self.drop(self.layers[0](self.direct.forward(x)))
        return out


def look(module: nn.Module, args: object, output: object) -> None:
    """A hook of a user."""


def test_every_hook_has_an_owner_and_a_place() -> None:
    """Ours, torch's own, those of packages, and unknown ones with file and line."""
    model = Net()
    prune.l1_unstructured(model.body, "weight", 0.5)
    parametrizations.weight_norm(model.tied)
    foreign = model.direct.register_forward_hook(functools.partial(look))
    on_tensor = model.unused.weight.register_hook(lambda grad: None)
    with hl.attach(model, "attn", look) as handle, hl.watch(model, "body"):
        found = {(hook.site, hook.kind): hook for hook in doctor(model).hooks}
    assert found["attn", "forward"].owner == "hookline"
    assert found["attn", "forward"].name == "look"
    assert found["body", "forward"].owner == "hookline"
    assert found["body", "forward_pre"].owner == "torch"
    assert found["body", "forward_pre"].where.startswith("torch/nn/utils/prune.py:")
    assert found["tied", "parametrization"].owner == "torch"
    assert "tied.parametrizations.weight" not in [site.name for site in doctor(model).silent]  # it is called
    unknown = found["direct", "forward"]
    assert unknown.owner == "unknown"
    assert unknown.where.endswith(f"test_doctor.py:{look.__code__.co_firstlineno}")
    assert found["unused.weight", "tensor"].owner == "unknown"
    foreign.remove()
    on_tensor.remove()
    left = {(hook.site, hook.kind) for hook in doctor(model).hooks}
    assert not {("attn", "forward"), ("direct", "forward"), ("unused.weight", "tensor")} & left
    assert handle.removed


@pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")
def test_hooks_of_the_process_are_listed_too() -> None:
    """On functions, and on every module by torch's own call."""
    model = nn.Linear(2, 2)
    with hl.attach_function("*.relu", lambda fn, inputs, outputs: None) as handle:
        everywhere = register_module_forward_hook(look)
        try:
            found = {hook.site: hook for hook in doctor(model).hooks}
        finally:
            everywhere.remove()
    assert found["(the process)"].kind == "forward"
    assert found["(every module)"].where.endswith(f"test_doctor.py:{look.__code__.co_firstlineno}")
    assert handle.removed
    assert doctor(model).hooks == []


def test_a_hook_where_none_fires_is_a_problem_with_the_reason() -> None:
    """So is one that sits twice."""
    model = Net()
    assert doctor(model).problems == []
    handle = hl.attach(model, "attn.out_proj", look)
    for _ in range(2):
        model.body.register_forward_hook(look)
    problems = doctor(model).problems
    assert len(problems) == 2
    assert problems[0].startswith("look (forward) on attn.out_proj will not fire: MultiheadAttention uses its weights")
    assert problems[1] == "look (forward) is on body 2 times"
    handle.remove(quiet=True)


def test_a_model_that_vllm_has_compiled_is_named() -> None:
    """Its code has no guards, so a hook that comes after it is never noticed."""

    class TorchCompileWithNoGuardsWrapper(nn.Sequential):
        """Of the name that vLLM's has."""

    model = TorchCompileWithNoGuardsWrapper(nn.Linear(2, 2))
    handle = hl.attach(model, "0", look)
    assert any("will not fire" in each and "without guards" in each for each in doctor(model).problems)
    handle.remove(quiet=True)


def test_the_command_prints_and_exits_by_the_problems(tmp_path, capsys, monkeypatch) -> None:
    """As text and as JSON."""
    (tmp_path / "doctored.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def model():\n"
        "    return nn.TransformerEncoderLayer(4, 2, batch_first=True)\n"
        "def hooked():\n"
        "    made = model()\n"
        "    made.self_attn.out_proj.register_forward_hook(print)\n"
        "    return made\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["doctor", "doctored.py:model"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("TransformerEncoderLayer: 0 hooks; no problems")
    assert "self_attn.out_proj" in text
    assert main(["doctor", "doctored.py:hooked", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["unheard"][0]["site"] == "self_attn.out_proj"
    assert len(found["problems"]) == 1
    assert main(["doctor", "doctored.py:modle"]) == 2
    assert "model" in capsys.readouterr().err
