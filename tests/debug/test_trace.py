"""``trace`` and ``trace_outputs``: what they write of all kinds of models, and that they change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.debug import RowKey, read_trace
from hookline.debug.compare.recorder import TraceRecorder
from hookline.debug.compare.trace import trace, trace_outputs
from hookline.factories import Tokens, serving


class Block(nn.Module):
    """Returns a tensor and a dict, and repeats its linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = self.drop(self.act(self.lin(x)))
        again = self.lin(hidden) * scale
        return again, {"hidden": hidden}


class Net(nn.Module):
    """Two blocks, BatchNorm, and a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.tail = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(checkpoint(self.tail, self.norm(x), use_reentrant=False))


def made(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    """A model with its optimizer."""
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: Any, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    """Train, each step with two micro-batches."""
    for _ in range(count):
        for _ in range(2):
            model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_is_written_in_call_order_with_all_kinds(tmp_path):
    """Sites, kinds, leaves, calls; numbers as torch finds them."""
    model, optimizer = made()
    kept: list[Tensor] = []
    kinds = ("input", "output", "output_grad", "input_grad", "parameter", "param_grad")
    with trace(model, to=tmp_path / "t", kinds=kinds, step=optimizer, tensors="head") as running:
        handle = hl.attach(model, "head", lambda module, args, output: kept.append(output.detach().clone()))
        step(model, optimizer, 2)
        handle.remove(quiet=True)
    folder = read_trace(tmp_path / "t")
    assert folder.problems == ()
    assert len(folder) == running.records
    assert folder.steps == (0, 1)
    first = [each for each in folder.records if each.step == 0 and each.kind == "output"]
    names = [(each.site, each.leaf) for each in first]
    assert names[:6] == [
        ("layers.0.lin", ""),
        ("layers.0.act", ""),
        ("layers.0.drop", ""),
        ("layers.0.lin", ""),
        ("layers.0", "0"),
        ("layers.0", "1.hidden"),
    ]
    assert names[-2:] == [("head", ""), ("", "")]
    assert names.count(("tail.0", "")) == 2  # one for each micro-batch: what checkpointing repeats is written once
    assert [each.call for each in first if each.site == "layers.1.lin"] == [0, 1, 2, 3]
    outputs = {(each.step, each.call): each for each in folder.records if each.site == "head" and each.kind == "output"}
    for (number, call), record in outputs.items():
        true = kept[2 * number + call]
        assert torch.equal(record.tensor(), true)
        assert record.fingerprint.norm == pytest.approx(true.norm().item(), rel=1e-5)
        assert record.fingerprint.mean == pytest.approx(true.mean().item(), rel=1e-4, abs=1e-6)
        assert record.fingerprint.absmax == true.abs().max().item()
        assert (record.fingerprint.count, record.shape) == (12, (4, 3))
    grads = [(each.site, each.call) for each in folder.records if each.kind == "output_grad" and each.step == 1]
    assert grads.count(("layers.0.lin", 0)) == grads.count(("layers.0.lin", 3)) == 1
    assert (
        grads.index(("head", 0))
        < grads.index(("tail", 0))
        < grads.index(("layers.0.lin", 1))
        < grads.index(("head", 1))
    )
    parameters = dict(model.named_parameters())
    for kind, count in (("parameter", 1), ("param_grad", 2)):
        found = [each.site for each in folder.records if each.kind == kind]
        assert sorted(found) == sorted(list(parameters) * count)
    assert {each.leaf for each in folder.records if each.kind == "input" and each.site == "head"} == {"0"}
    assert any(each.kind == "input_grad" and each.site == "head" for each in folder.records)


class OnDevice(TraceRecorder):
    """Takes the way of tensors that are on a device."""

    def _fingerprint(self, local: Tensor) -> Any:
        return self._on_device(local)


def test_rows_that_wait_on_a_device_are_written_like_numbers(tmp_path, monkeypatch):
    """Also when the buffer on the device is full several times a step, and with tensors."""
    monkeypatch.setattr("hookline.debug.compare.fingerprint.DeviceFingerprints.capacity", 7)
    for name in ("cpu", "device"):
        if name == "device":
            monkeypatch.setattr("hookline.debug.compare.trace.TraceRecorder", OnDevice)
        model, optimizer = made()
        with torch.no_grad():
            model.head.bias.add_(float(name == "device"))
        with trace(model, to=tmp_path / name, step=optimizer, kinds="output", tensors=["head", ""]):
            step(model, optimizer)
    one, two = (read_trace(tmp_path / name) for name in ("cpu", "device"))
    for a, b in zip(one.records, two.records, strict=True):
        assert (a.site, a.leaf, a.call, a.order) == (b.site, b.leaf, b.call, b.order)
        is_head = a.site in ("head", "")
        assert (a.fingerprint.hash != b.fingerprint.hash) == is_head == (b.read is not None)
        assert is_head or a.fingerprint.distance(b.fingerprint) <= 1e-5 * a.fingerprint.norm
        assert is_head or b.fingerprint.norm == pytest.approx(a.fingerprint.norm, rel=1e-5)
    head = [each for each in two.records if each.site == "head"]
    assert torch.equal(head[0].tensor(), next(each for each in two.records if not each.site).tensor())


def test_names_and_numbers_are_those_of_eager_code_when_compiled(tmp_path):
    """``torch.compile`` shows in neither names nor numbers, where its backend computes as eager code does."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x)))

    found = {}
    for name in ("eager", "compiled"):
        torch.manual_seed(0)
        model = Plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        called: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if name == "compiled" else model
        with trace(called, to=tmp_path / name, step=optimizer):
            for _ in range(2):
                called(torch.ones(3, 5)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        found[name] = {
            (each.site, each.kind, each.step, each.call): each.fingerprint
            for each in read_trace(tmp_path / name).records
        }
    torch.compiler.reset()
    assert found["eager"] == found["compiled"]
    assert ("a", "output_grad", 1, 0) in found["eager"]


def test_forwards_without_gradients_are_steps_and_are_written_at_once(tmp_path):
    """In inference mode each forward is a step, on disk when it returns; ``every`` and pauses count."""
    model, _ = made()
    model.eval()
    running = trace(model, "layers.#", to=tmp_path / "t", every=2)
    running.set_rows(["x", "y", "z", "w"])
    with torch.inference_mode():
        for _ in range(3):
            model(torch.randn(4, 6))
        with running.paused():
            model(torch.randn(4, 6))
        model(torch.randn(4, 6))  # step 3, as the pause was none
    running.flush()
    folder = read_trace(tmp_path / "t")
    assert {each.step for each in folder.records if each.kind == "output"} == {0, 2}
    assert "was not closed" in folder.problems[0]
    rows = folder.records[-1].rows
    assert rows is not None
    assert rows.keys == tuple(RowKey(name, None) for name in "xyzw")
    running.remove()
    running.remove()
    hl.assert_no_hooks(model, foreign=True)
    assert read_trace(tmp_path / "t").problems == ()


def test_each_rank_has_its_folder(tmp_path, monkeypatch):
    """The rank that ``torchrun`` gives names the folder; what is missing of the others is told."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, _ = made()
    with trace(model, to=tmp_path, kinds="output"):
        model(torch.randn(4, 6))
    folder = read_trace(tmp_path)
    assert folder.ranks == (1,)
    assert {each.rank for each in folder.records} == {1}
    assert any("no folder of rank 0" in each for each in folder.problems)


def trained(folder: Any, disturb: bool = False) -> list[Tensor]:
    """Everything that a run of 20 steps leaves behind, traced if there is a folder."""
    model, optimizer = made(3)
    torch.manual_seed(5)
    kinds = ("input", "output", "output_grad", "input_grad", "parameter", "param_grad")
    running = trace(model, to=folder, kinds=kinds, step=optimizer, tensors="*.lin") if folder is not None else None
    for _ in range(20):
        step(model, optimizer)
        if disturb:
            torch.rand(1)
    if running is not None:
        running.remove()
    return [*model.state_dict().values(), torch.get_rng_state(), *(s["exp_avg_sq"] for s in optimizer.state.values())]


def test_a_traced_run_ends_with_the_same_bits(tmp_path):
    """Dropout, BatchNorm, checkpointing, AdamW; the negative control draws one number a step."""
    plain = trained(None)
    assert all(map(torch.equal, plain, trained(tmp_path / "t")))
    assert not all(map(torch.equal, plain, trained(None, disturb=True)))


ROWS = Tokens.padded(("req-a", "req-b"), ((7, 8, 9), (3,)), (0, 4), "prefill")
LATER = Tokens.padded(("req-b",), ((4,),), (5,), "decode")


class Prompts:
    """A mode of SGLang."""

    is_decode = is_idle = is_mixed = is_target_verify = staticmethod(lambda: False)


class Packed:
    """A flat batch, as SGLang's layers are called with."""

    input_ids = torch.tensor([1, 2, 3])
    positions = torch.tensor([0, 1, 9])
    seq_lens = torch.tensor([2, 10])
    forward_mode = Prompts()
    extend_seq_lens_cpu = (2, 1)
    rids = ("x", "y")


class Layer(nn.Module):
    """Returns hidden states and a residual."""

    def forward(self, hidden: torch.Tensor, batch: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden * 2, hidden


MADE: list[Any] = []


def kept(config: Any) -> Any:
    """Make the hook by its path, as a spec does, and keep it, to be closed."""
    MADE.append(hl.specs.resolve_callable("hookline.debug:trace_outputs")(config))
    return MADE[-1]


def spec(folder: Any, **config: Any) -> dict[str, Any]:
    """A spec of the factory on all layers."""
    return {"target_modules": ["#"], "hook_factory": kept, "observe": True, "config": {"folder": str(folder), **config}}


def test_forwards_of_requests_are_steps_with_their_rows(tmp_path):
    """Padded rows have request and position; ``requests`` chooses forwards; numbers are those of ``trace``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 4))
    ids = torch.tensor([[7, 8, 9], [0, 0, 3]])
    specs = [spec(tmp_path / "all", tensors=["1"]), spec(tmp_path / "some", requests=["req-a*"])]
    with hl.register_hooks(model, specs), torch.inference_mode():
        with serving(ROWS):
            model(ids)
        with serving(LATER):
            model(torch.tensor([[4]]))
        model(ids)
    while MADE:
        MADE.pop().close()
    with trace(model, "#", to=tmp_path / "plain", kinds="output"), torch.inference_mode():
        model(ids)
    folder = read_trace(tmp_path / "all")
    assert folder.problems == ()
    assert [(each.site, each.step, each.call) for each in folder.records] == [(s, n, 0) for n in range(3) for s in "01"]
    rows = folder.records[0].rows
    assert rows is not None
    assert rows.dims == 2
    assert rows.keys == (*(RowKey("req-a", n) for n in range(3)), None, None, RowKey("req-b", 4))
    decode = folder.records[2].rows
    assert decode is not None
    assert decode.keys == (RowKey("req-b", 5),)
    assert folder.records[4].rows is None
    assert {each.step for each in read_trace(tmp_path / "some").records} == {0}
    plain = read_trace(tmp_path / "plain").records
    assert [each.fingerprint for each in plain] == [each.fingerprint for each in folder.records[:2]]
    assert torch.equal(folder.records[1].tensor(), model(ids))


def test_plain_torch_calls_it_with_flat_batches_and_pairs(tmp_path):
    """Without sites a forward begins at the first module; rows come from the batch; of pairs both are there."""
    hook = trace_outputs({"folder": str(tmp_path)})
    layers = nn.ModuleList(Layer() for _ in range(2))
    for layer in layers:
        layer.register_forward_hook(hook)
    for _ in range(3):
        for layer in layers:
            layer(torch.ones(3, 4), Packed())
    hook.close()
    hook.close()
    folder = read_trace(tmp_path)
    assert [(each.site, each.step, each.leaf) for each in folder.records] == [
        (f"Layer.{n}", step, leaf) for step in range(3) for n in (0, 1) for leaf in "01"
    ]
    assert [each.fingerprint.mean for each in folder.records[:2]] == [2.0, 1.0]
    rows = folder.records[0].rows
    assert rows is not None
    assert rows.keys == (RowKey("x", 0), RowKey("x", 1), RowKey("y", 9))
    assert hook.to_metrics()["records"] == 12
