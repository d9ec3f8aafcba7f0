"""The guard on a CUDA device: copies there or on the host, random streams, no allocation after the first save."""

from __future__ import annotations

import pytest
import torch
from helpers_guard import OPTIMIZERS, Run, differing, portrait
from torch import nn

from hookline.errors import GuardError
from hookline.guard import snapshot as copies
from hookline.guard.guard import Guard, rollback

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def _device_bytes(save) -> int:
    """Return how many bytes of the device a first save takes for good."""
    before = torch.cuda.memory_allocated()
    save()
    return torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_everything_comes_back_wherever_the_copies_are(optimizer, where, monkeypatch):
    """Bytes, addresses, objects, versions, random streams."""
    run = Run(optimizer, device="cuda")
    before = portrait(run)
    if where == "host":
        monkeypatch.setattr(copies, "_fits", lambda device, nbytes: False)
    guard = Guard(*run.guarded, loader=run.loader)
    assert (_device_bytes(guard.save) > 0) is (where == "device")
    for _ in range(2):
        with guard.protecting("ruin"):
            run.step()
            nn.init.zeros_(run.model.head.weight)
            run.model.norm.running_mean.data.fill_(9)
            torch.rand(3, device="cuda")
        assert differing(before, portrait(run)) == []


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
    monkeypatch.setattr(copies, "_empty_like", lambda piece, home: torch.empty(1 << 50, device=home))
    with pytest.raises(GuardError, match=r"no room on cpu.*Nothing was touched"):
        Guard(*run.guarded).save()
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
def test_every_bit_of_a_nan_comes_back(where, monkeypatch):
    """Of signalling NaNs, in pieces that are copied together and in one that is copied alone."""
    model, bits = nn.Module(), {}
    for number, (dtype, integers, pattern) in enumerate(_ODD_NANS):
        for size in (7, 9 * 2**20):
            bits[f"{number}_{size}"] = torch.full((size,), pattern, dtype=integers, device="cuda")
            model.register_buffer(f"{number}_{size}", bits[f"{number}_{size}"].view(dtype).clone())
    if where == "host":
        monkeypatch.setattr(copies, "_fits", lambda device, nbytes: False)
    guard = Guard(model)
    guard.save()
    with guard.protecting("zero"):
        for buffer in model.buffers():
            buffer.zero_()
    assert all(torch.equal(buffer.view(bits[name].dtype), bits[name]) for name, buffer in model.named_buffers())


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


def test_memory_that_comes_back_at_the_address_of_freed_memory_is_not_taken_for_it():
    """The allocator gives the next tensor of that size the place of the one before."""
    model = nn.Linear(512, 512, device="cuda")
    before = model.weight.detach().clone()
    with rollback(model) as receipt, torch.no_grad():
        memory, length = model.weight.untyped_storage(), model.weight.untyped_storage().nbytes()
        model.weight.data = torch.empty(0, device="cuda")
        memory.resize_(0)
        model.weight.data = torch.full((512, 512), 7.0, device="cuda")
        memory.resize_(length)
    assert torch.equal(model.weight, before)
    assert "model.weight" in receipt.touched
