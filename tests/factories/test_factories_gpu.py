"""The factories on a GPU: no forward waits for the device, and what they tell is true; else skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_factories import Batch, Decoder
from helpers_waiting import until
from torch import Tensor, nn

import hookline as hl
from hookline.factories import (
    ProbeHead,
    Tokens,
    activation_stats,
    export,
    nan_alarm,
    probe,
    read_export,
    serving,
    steer,
)
from hookline.factories.request_notes import read_flags

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # of torch, once, that it does not see all
]

MODES = (torch.inference_mode, torch.no_grad)
TWO = Tokens.padded(("a", "b"), ((1, 2, 3), (9,)), (0, 0), "prefill")


@contextmanager
def no_waiting() -> Iterator[None]:
    """An error for whoever waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def head_of(width: int) -> ProbeHead:
    """A head whose logit is the first unit."""
    return ProbeHead([(torch.eye(width)[:1], torch.zeros(1))])


def model_of(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)) for _ in range(4)]
    return nn.Sequential(*layers).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padded", [True, False])
def test_no_forward_waits_under_any_hook(mode: Any, padded: bool, tmp_path: Path) -> None:
    """All but the alarm, on every module, over thirty forwards; the first ones compile kernels."""
    model = model_of()
    hooks = [activation_stats(), export({"folder": str(tmp_path)})]
    hooks.append(steer({"vector": [0.5] * 64}))
    hooks.append(probe({"head": head_of(64), "action": "flag"}))
    x = torch.randn(2, 3, 64, device="cuda", dtype=torch.bfloat16)
    with ExitStack() as attached, mode(), serving(TWO if padded else None):
        for hook in hooks:
            attached.enter_context(hl.attach(model, "*", hook))
        for _ in range(6):
            model(x)
        with no_waiting():
            for _ in range(30):
                model(x)
    for hook in hooks:
        hook.close()
    assert hooks[1].to_metrics()["dropped"] == 0
    assert len(list(read_export(tmp_path))) == 36 * 13 * (2 if padded else 1)


@pytest.mark.parametrize("mode", MODES)
def test_statistics_are_those_of_torch(mode: Any) -> None:
    """Also of a layer whose output is changed in place by the next."""
    model = model_of()
    stats = activation_stats({"stats": ["mean", "absmax", "zero_fraction"]})
    linears, seen = ["0.0", "1.0", "2.0", "3.0"], {}
    with hl.attach(model, linears, stats), mode():
        for _ in range(5):
            x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
            model(x)
            for index, layer in enumerate(model):
                before = layer[0].forward(x)
                seen.setdefault(f"{index}.0", []).append(before.double())
                x = before.relu()
    found = stats.to_metrics()
    for name, tensors in seen.items():
        want = torch.cat(tensors)
        assert found[f"{name}/mean"] == pytest.approx(want.mean().item(), abs=1e-4)
        assert found[f"{name}/absmax"] == pytest.approx(want.abs().max().item())
        assert found[f"{name}/zero_fraction"] == pytest.approx((want == 0).double().mean().item())


def test_the_alarm_comes_later_and_once(caplog: pytest.LogCaptureFixture) -> None:
    """A NaN in one forward is logged in one of the next, once."""
    model, hook = model_of(), nan_alarm()
    x = torch.randn(2, 64, device="cuda", dtype=torch.bfloat16)
    bad = x.clone()
    bad[0, 0] = torch.nan

    def go_on() -> bool:
        model(x)
        return bool(caplog.messages)

    with hl.attach(model, "#", hook), torch.inference_mode():
        model(x)
        model(bad)
        until(go_on)
    assert [message.split()[0] for message in caplog.messages] == ["0", "1", "2", "3"]
    assert "64 NaN" in caplog.messages[0]


def test_export_is_what_the_forward_gave_out_though_it_is_changed_at_once(tmp_path: Path) -> None:
    """In-place changes right behind the call, on another stream than the default one, under load."""
    hook, module = export({"folder": str(tmp_path)}), nn.Identity()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        load = torch.randn(2048, 2048, device="cuda")
        for call in range(50):
            load = (load @ load).clamp_(-1, 1)
            x = (
                torch.full((256, 1024), float(call), device="cuda", dtype=torch.bfloat16)
                + load[0, 0].to(torch.bfloat16) * 0
            )
            hook(module, (), x)
            x.fill_(-1.0)
    hook.close()
    records = list(read_export(tmp_path))
    assert [each.call for each in records] == list(range(50))
    assert all(each.tensor.eq(each.call).all() for each in records)


def test_export_reads_a_batch_that_is_on_the_device(tmp_path: Path) -> None:
    """Tokens and positions are copied with the tensor, and read by the thread; lengths are on the host."""
    model, hook = Decoder().to("cuda"), export({"folder": str(tmp_path)})
    model.layers[1].register_forward_hook(hook)

    def on_device(*numbers: int) -> Tensor:
        return torch.tensor(numbers, device="cuda")

    batch = Batch(
        on_device(11, 12, 13, 21, 22),
        on_device(0, 1, 2, 0, 1),
        on_device(3, 2),
        on_device(4, 7),
        rids=["a", "b"],
        extend_seq_lens_cpu=[3, 2],
    )
    with torch.inference_mode():
        model(batch)
        torch.cuda.synchronize()
        with no_waiting():
            hook(model.layers[1], (batch,), torch.ones(5, 8, device="cuda"))
            batch.input_ids.zero_()
        torch.cuda.synchronize()
    hook.close()
    assert [(each.request, each.tokens, each.positions) for each in read_export(tmp_path)] == [
        ("a", (11, 12, 13), (0, 1, 2)),
        ("b", (21, 22), (0, 1)),
    ] * 2


@pytest.mark.parametrize("mode", MODES)
def test_a_cuda_graph_can_be_captured_under_them(mode: Any, tmp_path: Path) -> None:
    """The graph is recorded and replays right; export takes what runs eagerly, and nothing of the capture."""
    hooks = [activation_stats(), nan_alarm(), export({"folder": str(tmp_path)})]
    module, x = nn.Linear(8, 8, device="cuda"), torch.randn(2, 8, device="cuda")
    for hook in hooks:
        module.register_forward_hook(hook)
    with mode():
        for _ in range(3):
            module(x)
        torch.cuda.synchronize()
        until(lambda: hooks[2].to_metrics()["written_tensors"] == 3)  # no thread may allocate during a capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module(x)
        graph.replay()
        torch.cuda.synchronize()
        want = module.forward(x)
    assert torch.allclose(out, want)
    for hook in hooks:
        hook.close()
    assert len(list(read_export(tmp_path))) == 3


def test_scores_are_those_of_the_cpu() -> None:
    """A probe flags the same tokens of the same requests, from the same numbers."""
    flags, found = {}, {}
    hidden = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    hidden[..., 0] = torch.tensor([[-1.0, 2.0, 1.0], [3.0, 3.0, 0.5]])  # two tokens of a, one of b, and padding
    for device in ("cpu", "cuda"):
        hook = probe({"head": head_of(64), "action": "flag"})
        with serving(table := TWO.noted()):
            hook(nn.Identity(), (), hidden.to(device))
        flags[device] = read_flags(table)
        found[device] = hook.to_metrics()
    assert found["cuda"] == pytest.approx(found["cpu"], rel=1e-5)
    assert flags["cpu"], "nothing is flagged, which proves nothing"
    assert {request: [(f.tokens, f.position) for f in found] for request, found in flags["cuda"].items()} == {
        request: [(f.tokens, f.position) for f in found] for request, found in flags["cpu"].items()
    }
