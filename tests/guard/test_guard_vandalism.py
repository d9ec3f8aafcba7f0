"""Nasty acts inside a guarded block, one by one, and then at random in child processes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import vandals
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hookline as hl
from hookline.guard.guard import Guard, rollback
from hookline.guard.torch_switches import TorchSwitches


class _Net(nn.Module):
    """Normalization, dropout, a frozen layer, and buffers that are views of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(4, 4)
        self.out = nn.Linear(4, 1)
        self.register_buffer("corner", self.first.weight.detach()[:2])
        self.register_buffer("row", self.second.weight.data[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.frozen(self.norm(self.first(x)).relu()))
        return self.out(self.second(hidden)) + self.corner.sum() * 0.1 + self.row.sum() * 0.1


class _Run:
    """A model that trains, with the graph of a step alive if asked for."""

    def __init__(self, *, alive: bool = False) -> None:
        torch.manual_seed(0)
        self.model = _Net()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.01)
        self.x = torch.randn(8, 3)
        self.step()
        self.loss = self.forward() if alive else None

    def forward(self) -> torch.Tensor:
        return self.model(self.x).square().mean()

    def step(self, loss: torch.Tensor | None = None) -> None:
        loss = self.forward() if loss is None else loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def end(self) -> list[bytes]:
        """Train on for 20 steps, first by the graph that is alive, with everything unfrozen for the last ten."""
        self.step(self.loss)
        for number in range(20):
            if number == 10:
                self.model.requires_grad_(True)
            self.step()
        return [tensor.detach().numpy().tobytes() for tensor in self.model.state_dict().values()]


@functools.cache
def _expected(alive: bool) -> list[bytes]:
    return _Run(alive=alive).end()


Act = Callable[[_Run, list[Any]], Any]


def _data(change: Callable[[torch.Tensor], torch.Tensor]) -> Act:
    def act(run: _Run, keep: list[Any]) -> None:
        weight = run.model.second.weight
        weight.data = change(weight.data)
        keep.append((weight * 2).sum())

    return act


def _there_and_back(run: _Run, keep: list[Any]) -> None:
    weight = run.model.second.weight
    data = weight.data
    weight.data = torch.zeros(7)
    keep.append((weight * 2).sum())
    weight.data = data


def _frozen_reshaped(run: _Run, keep: list[Any]) -> None:
    weight = run.model.frozen.weight.requires_grad_(True)
    weight.data = torch.zeros(7)
    keep.append((weight * 2).sum())


def _swap(run: _Run, keep: list[Any]) -> None:
    model = run.model
    torch.utils.swap_tensors(model.first.bias, model.out.bias)
    torch.utils.swap_tensors(model.out.bias, model.second.bias)
    if run.loss is None:  # torch refuses where a graph has saved them; buffers are views of both
        torch.utils.swap_tensors(model.first.weight, model.second.weight)
        torch.utils.swap_tensors(model.second.weight, model.norm.weight)


def _swap_outside(run: _Run, keep: list[Any]) -> None:
    other = nn.Parameter(torch.zeros(9))
    other.mark = "outside"
    torch.utils.swap_tensors(run.model.second.bias, other)


def _swap_and_retype(run: _Run, keep: list[Any]) -> None:
    torch.utils.swap_tensors(run.model.first.bias, run.model.second.bias)
    run.model.double()


def _half_swap(run: _Run, keep: list[Any]) -> None:
    """torch refuses since a view refers to the second, when it has forbidden backward passes into the first."""
    view = run.model.second.bias.view(-1)
    with pytest.raises(RuntimeError, match="use_count of t2"):
        torch.utils.swap_tensors(run.model.first.bias, run.model.second.bias)
    del view


def _shrink(*sizes: int) -> Act:
    def act(run: _Run, keep: list[Any]) -> None:
        state = run.optimizer.state[run.model.out.weight]["exp_avg"]
        grad = run.model.first.weight.grad
        for tensor in (run.model.first.weight, run.model.row, run.model.norm.running_mean, state, grad):
            for size in sizes:
                tensor.untyped_storage().resize_(size)

    return act


ACTS: dict[str, Act] = {
    "bfloat16": _data(torch.Tensor.bfloat16),
    "double": _data(torch.Tensor.double),
    "another shape": _data(lambda data: torch.zeros(7)),
    "another shape and dtype": _data(lambda data: torch.zeros(2, 2, dtype=torch.float16)),
    "another shape and back": _there_and_back,
    "a frozen one of another shape": _frozen_reshaped,
    "the whole model double": lambda run, keep: keep.append(run.model.double()(run.x.double())),
    "swapped": _swap,
    "swapped with one outside the model": _swap_outside,
    "swapped and of another dtype": _swap_and_retype,
    "a swap that torch refuses": _half_swap,
    "shrunk to nothing": _shrink(0),
    "shrunk": _shrink(4),
    "shrunk again and again": _shrink(44, 12, 44, 8, 40),
    "grown": _shrink(5000),
    "frozen by hl.freeze": lambda run, keep: keep.append(hl.freeze(run.model)),
    "what is frozen, frozen by hl.freeze": lambda run, keep: keep.append(hl.freeze(run.model, "frozen")),
    "what is frozen, clipped": lambda run, keep: keep.append(hl.clip_gradients(run.model, "frozen", value=1e-9)),
    "unfrozen, then frozen by hl.freeze": lambda run, keep: (
        run.model.requires_grad_(True),
        keep.append(hl.freeze(run.model)),
    ),
    "not a number": lambda run, keep: run.model.second.weight.data.fill_(float("nan")),
}


@pytest.mark.parametrize("alive", [False, True], ids=["no graph", "a graph of before"])
@pytest.mark.parametrize("name", sorted(ACTS))
def test_training_goes_on_after_a_nasty_act_as_if_it_had_not_been(name, alive):
    """To the bit, with a graph of inside the block kept, and by a graph of before it."""
    run, keep = _Run(alive=alive), []
    stream = torch.get_rng_state()
    with rollback(run.model, run.optimizer):
        ACTS[name](run, keep)
    assert run.model.second.weight.shape == (4, 4)
    assert not [module for module in run.model.modules() if module._forward_pre_hooks or module._forward_hooks]
    assert torch.equal(torch.get_rng_state(), stream)
    assert run.end() == _expected(alive)


@pytest.mark.parametrize("name", ["another shape", "double", "swapped", "shrunk to nothing", "not a number"])
def test_the_same_acts_without_a_guard_are_noticed(name):
    """The control: the run fails, or ends otherwise."""
    run, keep = _Run(), []
    ACTS[name](run, keep)
    if name.startswith("shrunk"):
        assert run.model.first.weight.untyped_storage().nbytes() == 0  # to compute with it would end the process
        return
    try:
        ends = run.end()
    except RuntimeError:
        return
    assert ends != _expected(False)


def test_freezing_what_is_frozen_leaves_nothing_to_count_forwards_by():
    """It hooks no parameter, so it needs no port; and none stays when it is taken off."""
    model = nn.Linear(2, 2).requires_grad_(False)
    handle = hl.freeze(model)
    assert not model._forward_pre_hooks
    handle.remove()


def test_a_recurrent_layers_graph_of_before_is_not_invalidated():
    """Its kernel keeps its outputs, and an attribute of the model shares their memory and counter."""
    run = vandals.VandalizedRun("lstm", "adamw_fused")
    with rollback(run.model, run.optimizer):
        run.step()
        run.model.last.zero_()
    version = run.model.last._version
    with rollback(run.model, run.optimizer):
        pass
    assert run.model.last._version == version
    run.train_on()


def test_two_blocks_of_one_firing_may_write_the_same_view_with_a_graph():
    """Each gives it other internals; a graph of before the first still finds what it left."""
    run = vandals.VandalizedRun("rnn", "adam")
    guard = Guard(*run.guarded)
    guard.save()
    for _ in range(3):
        with guard.protecting("any"):
            run.model.last.mul_(run.model.out.bias.sum())
        assert (run.model.last.requires_grad, run.model.last.is_leaf) == (False, True)
    guard.release()
    run.train_on()


def test_a_computed_tensor_that_was_written_with_a_graph_is_named():
    """Its numbers come back and its graph cannot: a gradient through it would be another."""
    model = nn.Linear(2, 2)
    model.hidden = model(torch.ones(1, 2))
    with pytest.raises(hl.errors.GuardError, match=r"model\.hidden"), rollback(model):
        model.hidden.mul_(model.weight.sum())


def test_memory_that_was_shrunk_and_shown_to_numpy_is_replaced_and_named():
    """torch does not resize it any more; numbers come back all the same, views of it included."""
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.arange(6.0))
    model.register_buffer("rest", model.scale[3:])

    def act() -> None:
        model.scale.untyped_storage().resize_(4)
        model.scale[:1].numpy()

    with pytest.raises(hl.errors.GuardError, match=r"model\.scale \(its memory was shrunk"), rollback(model):
        act()
    assert (model.scale.tolist(), model.rest.tolist()) == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [3.0, 4.0, 5.0])
    model.scale[3] = 7
    assert model.rest[0] == 7


def test_an_array_of_another_shape_or_type_comes_back():
    """The same object: one that owns its memory, and a view."""
    model = nn.ReLU()
    model.table, model.view = np.arange(4.0), np.arange(6.0)[:4]
    table, view = model.table, model.view
    with rollback(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy would rather have neither assigned
        model.table.resize(7, refcheck=False)
        model.view.shape = (2, 2)
    with rollback(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.table.dtype = np.int64
    assert model.table is table
    assert model.view is view
    assert table.tolist() == view.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_strict_mode_does_not_read_beyond_memory_that_was_shrunk():
    """It compares byte by byte, and has nothing to compare here."""
    model = nn.Linear(2, 2)
    guard = Guard(model, strict=True)
    guard.save(["reads"])
    with pytest.raises(hl.errors.GuardError, match=r"changed model\.weight"), guard.protecting("any", "reads"):
        model.weight.untyped_storage().resize_(0)
    assert model.weight.isfinite().all()


def test_a_checkpoint_of_an_intervention_names_what_it_cannot_bring_back():
    """As the guard does; never in silence."""
    model = nn.Linear(2, 2)
    model.hidden = model(torch.ones(1, 2))
    context = hl.ModelDataContext(model)
    token = context.save_checkpoint()
    model.hidden.mul_(model.weight.sum())
    with pytest.raises(hl.errors.GuardError, match=r"restore_checkpoint\('ckpt_0'\).*model\.hidden"):
        context.restore_checkpoint(token)


@pytest.fixture
def parallel(tmp_path):
    """A model whose gradients are added up over processes, of which there is one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield DistributedDataParallel(nn.Linear(2, 2))
    finally:
        torch.distributed.destroy_process_group()


def test_a_data_parallel_model_that_would_lose_gradients_is_named(parallel):
    """torch makes new nodes for data of another dtype, and the hooks of DistributedDataParallel are on the old."""
    with rollback(parallel):
        parallel.module.weight.data = parallel.module.weight.data.clone()
    with (
        pytest.raises(hl.errors.GuardError, match=r"weight \(DistributedDataParallel would not see"),
        rollback(parallel),
    ):
        parallel.module.weight.data = parallel.module.weight.data.double()


# -- at random --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", sorted(vandals.ACTS.keys() - {"stop", "grow", "resize", "array", "last", "reshape and back"})
)
def test_the_fuzzer_sees_what_a_missing_guard_lets_through(name: str) -> None:
    """The control: an act alone, with nothing put back, leaves a trace in the portrait."""
    run = vandals.VandalizedRun("tied", "adam", False)
    before, switches, rng = vandals.portrait(run), TorchSwitches(), vandals.random.Random(1)
    try:
        for _ in range(3):
            vandals.ACTS[name](run, rng)
        if name == "shrink":
            tensors = [*run.model.parameters(), *run.model.buffers(), *(p.grad for p in run.model.parameters())]
            tensors += [v for state in run.optimizer.state.values() for v in state.values()]
            assert any(tensor.untyped_storage().nbytes() < tensor.nbytes for tensor in tensors)
        else:
            seen = vandals.switches() if name == "switches" else vandals.portrait(run)
            assert [key for key in seen if key not in before or seen[key] != before[key]] != []
    finally:
        switches.restore()
        hl.HandleSet(kept for kept in run.keep if isinstance(kept, hl.HookHandle)).remove(quiet=True)


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "let go"])
@pytest.mark.parametrize("hooked", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_in_the_internals_of_a_new_parameter_does_not_come_along_with_them(hooked: str, is_kept: bool) -> None:
    """The block makes a parameter with a hook that doubles gradients, and swaps its internals with an old one's."""

    def double(value: Any) -> Any:
        value.mul_(2) if value.grad is None else value.grad.mul_(2)

    def trained(*, with_block: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        kept = []
        if with_block:
            with hl.rollback(model, optimizer):
                model[0].weight = nn.Parameter(torch.ones(4, 4))
                getattr(model[0].weight, hooked)(double)
                torch.utils.swap_tensors(model[0].weight, model[2].weight)
                kept += [model[0].weight] * is_kept
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
        return list(model.parameters())

    assert all(map(torch.equal, trained(with_block=True), trained(with_block=False)))


def test_the_attributes_of_a_parameter_come_back_as_the_same_dictionary() -> None:
    """``swap_tensors`` exchanges them before it exchanges the internals, and may refuse that."""
    model = nn.Linear(2, 2)
    model.weight.mark = "own"
    own = vars(model.weight)
    with hl.rollback(model):
        model.weight.__dict__ = {"mark": "outside"}
    assert vars(model.weight) is own
    assert model.weight.mark == "own"
