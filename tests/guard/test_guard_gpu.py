"""The guard on a CUDA device: copies there or on the host, random streams, no allocation after the first save."""

from __future__ import annotations

import pytest
import torch
from helpers_guard import OPTIMIZERS, Run, differing, portrait
from torch import nn

from hookline.errors import GuardError
from hookline.guard import snapshot as copies
from hookline.guard.guard import Guard, rollback
from hookline.guard.rng import RandomStates, kept_rng

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def _device_bytes(save) -> int:
    """Return how many bytes of the device a first save takes for good."""
    before = torch.cuda.memory_allocated()
    save()
    return torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("where", ["device", "host", "auto"])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_everything_comes_back_wherever_the_copies_are(optimizer, where):
    """Bytes, addresses, objects, versions, random streams."""
    run = Run(optimizer, device="cuda")
    before = portrait(run)
    guard = Guard(*run.guarded, loader=run.loader, where=where)
    assert _device_bytes(guard.save) > 0 or where == "host"
    for _ in range(2):
        with guard.protecting("ruin"):
            run.step()
            nn.init.zeros_(run.model.head.weight)
            run.model.norm.running_mean.data.fill_(9)
            torch.rand(3, device="cuda")
        assert differing(before, portrait(run)) == []


def test_streams_of_every_device_stand_where_they_stood():
    """By both ways."""
    torch.cuda.manual_seed_all(3)
    torch.rand(1, device="cuda")
    states = RandomStates()
    expected = torch.rand(4, device="cuda")
    assert "random stream of cuda:0" in states.changed()
    states.restore()
    with kept_rng():
        torch.rand(7, device="cuda")
    assert torch.equal(torch.rand(4, device="cuda"), expected)


def test_copies_that_do_not_fit_go_to_the_host(monkeypatch):
    """By what is free, and also when it turns out too little on the way; or they are refused with nothing touched."""
    run = Run(device="cuda")
    before = portrait(run)
    guard = Guard(*run.guarded)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, 1))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 0)
    assert _device_bytes(guard.save) == 0
    with guard.protecting("any"):
        run.step()
    assert differing(before, portrait(run)) == []


def test_out_of_memory_while_saving_goes_to_the_host_or_is_an_error(monkeypatch):
    """A real one: an allocation that no device can serve."""
    run = Run(device="cuda")
    before = portrait(run)
    original = copies._empty_like

    def greedy(piece, home):
        return torch.empty(1 << 50, device=home) if home.type == "cuda" else original(piece, home)

    monkeypatch.setattr(copies, "_empty_like", greedy)
    guard = Guard(*run.guarded)
    assert _device_bytes(guard.save) == 0
    with guard.protecting("any"):
        run.step()
    with pytest.raises(GuardError, match=r"no room on cuda.*Nothing was touched. Next: where='host'"):
        Guard(*run.guarded, where="device").save()
    assert differing(before, portrait(run)) == []


def test_nothing_is_allocated_after_the_first_save():
    """However many firings; gradients are new tensors each time, and their copies lie where the last were."""
    run = Run(device="cuda")
    guard = Guard(*run.guarded)
    counts = []
    for _ in range(4):
        run.step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        guard.save()
        with guard.protecting("any"):
            pass
        guard.release()
        counts.append(torch.cuda.memory_stats()["allocation.all.allocated"] - before)
    assert counts[0] > 0
    assert counts[1:] == [0, 0, 0]


_ODD_NANS = (
    (torch.float32, torch.int32, 0x7F800001),
    (torch.bfloat16, torch.int16, 0x7F81),
    (torch.float16, torch.int16, 0x7C01),
    (torch.float64, torch.int64, 0x7FF0000000000001),
)


@pytest.mark.parametrize("where", ["device", "host"])
def test_every_bit_of_a_nan_comes_back(where):
    """Of signalling NaNs, in pieces that are copied together and in one that is copied alone."""
    model, bits = nn.Module(), {}
    for number, (dtype, integers, pattern) in enumerate(_ODD_NANS):
        for size in (7, 9 * 2**20):
            bits[f"{number}_{size}"] = torch.full((size,), pattern, dtype=integers, device="cuda")
            model.register_buffer(f"{number}_{size}", bits[f"{number}_{size}"].view(dtype).clone())
    guard = Guard(model, where=where)
    guard.save()
    with guard.protecting("zero"):
        for buffer in model.buffers():
            buffer.zero_()
    assert all(torch.equal(buffer.view(bits[name].dtype), bits[name]) for name, buffer in model.named_buffers())


def test_floats_of_two_bytes_lose_bits_in_a_multi_tensor_copy():
    """Negative control, and the reason why pieces are integers: float32 comes through as it is, these do not."""
    is_same = []
    for dtype, integers, pattern in _ODD_NANS:
        bits = torch.full((64,), pattern, dtype=integers, device="cuda")
        copy = torch.zeros_like(bits).view(dtype)
        torch._foreach_copy_([copy], [bits.view(dtype)])
        is_same.append(torch.equal(copy.view(integers), bits))
    assert is_same == [True, False, False, True]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_saving_and_restoring_do_not_wait_for_the_device():
    """Saving and restoring are queued like any kernel."""
    run = Run(device="cuda")
    guard = Guard(*run.guarded)
    guard.save()
    with guard.protecting("first"):
        pass
    try:
        torch.cuda.set_sync_debug_mode("error")
        guard.save()
        with guard.protecting("second"):
            run.model.head.weight.data.zero_()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_training_in_half_precision_goes_on_to_the_last_bit():
    """Autocast, a scaler, a fused optimizer; interventions inside the autocast block."""

    def trained(guarded: bool) -> list[torch.Tensor]:
        run = Run("adamw_fused", device="cuda")
        guard = Guard(*run.guarded)
        for _ in range(20):
            with torch.autocast("cuda", torch.float16):
                run.model(torch.ones(4, 5, device="cuda"))
                if guarded:
                    guard.save()
                    with guard.protecting("each step"):
                        run.step()
                    guard.release()
                run.step()
        return [*run.model.state_dict().values(), torch.cuda.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(trained(False), trained(True), strict=True))


def test_a_model_on_two_devices_is_guarded_on_both():
    """Each part's copies are with it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).cuda())
    before = [p.detach().clone() for p in model.parameters()]
    with rollback(model, where="device"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.cpu()
    assert model[1].weight.is_cuda
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
