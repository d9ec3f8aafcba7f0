"""Vandalize guarded runs at random, and tell what is lost, what is said and what is silent.

A case is a number: it decides the model, the optimizer, and one to four blocks of nasty acts. Its run is made twice,
with the guarded blocks and without, and both are trained on. From the repository's root::

    python torture/run.py --parts interventions              # a quarter of an hour
    python torture/run.py --parts interventions --only 4711  # one case, in this process
"""

from __future__ import annotations

import functools
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import helpers_guard
import numpy as np
import torch
from helpers_cases import Case, Part
from helpers_guard import OPTIMIZERS, Stop, Tied, bytes_of, differing, guard_of
from torch import Tensor, nn
from torch.nn.utils import parametrize

import hookline as hl
from hookline.guard.guard import Guard

# -- runs -----------------------------------------------------------------------------------------------------------


class Views(nn.Module):
    """Buffers that are views of parameters, with and without autograd's knowledge, and views of one another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(5, 4), nn.Linear(4, 4)
        self.register_buffer("corner", self.inner.weight.detach()[:2])
        self.register_buffer("row", self.other.weight.data[1])
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("evens", self.scale[::2])
        self.table = np.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.inner(x).tanh() * self.scale) + self.corner.sum() + self.evens.sum()


class Recurrent(nn.Module):
    """A recurrent layer, whose kernel keeps its inputs and outputs, and the last state as an attribute."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.out = kind(5, 5, batch_first=True), nn.Linear(5, 3)
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.rnn(torch.stack([x, x * 2], 1))  # a row is a sequence of two
        self.last = found.detach()[:, -1]
        return self.out(found[:, -1])


class Frozen(nn.Module):
    """A part that takes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(5, 4).requires_grad_(False)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.back(x).relu()))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "tied in bfloat16": Tied,
    "views": Views,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "frozen": Frozen,
}


class VandalizedRun(helpers_guard.Run):
    """A run of which the graph of one more step may be alive."""

    def __init__(self, model: str, optimizer: str, is_graph_alive: bool = True) -> None:
        dtype = torch.bfloat16 if "bfloat16" in model else torch.float32
        super().__init__(optimizer, make=MODELS[model], dtype=dtype)
        self.batch = next(iter(self.loader))
        self.keep: list[Any] = []
        """What the vandal keeps alive."""
        self.is_torn = False
        """Whether a tensor has less memory than it reads: to compute with it would be the vandal's own crash."""
        self.shapes = [parameter.shape for parameter in self.model.parameters()]
        self.begun = self.forward() if is_graph_alive else None

    @property
    def can_compute(self) -> bool:
        """Whether computing is no crash of the vandal's own: recurrent kernels do not check the shapes of weights."""
        shapes = [parameter.shape for parameter in self.model.parameters()]
        return not self.is_torn and (not isinstance(self.model, Recurrent) or shapes == self.shapes)

    def train(self, steps: int = 1) -> None:
        """Finish the step whose graph is alive, and make ``steps`` in all."""
        for _ in range(steps):
            loss, self.begun = self.begun, None
            self.step(loss)

    def train_on(self) -> list[bytes]:
        """Make three steps, unfreeze everything, make one more, and return the weights."""
        self.train(3)
        self.model.requires_grad_(True)
        self.train()
        return [bytes_of(tensor) for tensor in self.model.state_dict().values()]


def portrait(run: VandalizedRun) -> dict[str, Any]:
    """Return by name everything that decides how the run goes on, its data and the switches of the process."""
    seen = helpers_guard.portrait(run, addresses=False)
    return seen | {f"data {n}": bytes_of(t) for n, t in enumerate(run.batch)} | switches()


def switches() -> dict[str, Any]:
    """Return where the switches of the process stand."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
    }


# -- acts -----------------------------------------------------------------------------------------------------------

Act = Callable[[VandalizedRun, random.Random], Any]


def _parameter(run: VandalizedRun, rng: random.Random) -> nn.Parameter:
    return rng.choice(list(run.model.parameters()))


def _tensor(run: VandalizedRun, rng: random.Random) -> Tensor:
    """Return a parameter, buffer, gradient or tensor of the optimizer's state."""
    grads = [p.grad for p in run.model.parameters() if p.grad is not None]
    states = [v for s in run.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    pool = [list(run.model.parameters()), list(run.model.buffers()), grads, states]
    return rng.choice(rng.choice([each for each in pool if each]))


def _owner(run: VandalizedRun, rng: random.Random) -> tuple[nn.Module, str]:
    """Return a module, and the name of a parameter of its own."""
    module = rng.choice([m for m in run.model.modules() if m._parameters])
    return module, rng.choice(list(module._parameters))


def _use(run: VandalizedRun, parameter: Tensor) -> None:
    """Keep a graph in which a parameter has the shape and dtype of now."""
    if not run.is_torn:
        run.keep.append((parameter * 2).sum())


def _retype(run: VandalizedRun, rng: random.Random) -> None:
    parameter = _parameter(run, rng)
    parameter.data = parameter.data.to(rng.choice([torch.bfloat16, torch.float64, torch.float16]))
    _use(run, parameter)


def _reshape(run: VandalizedRun, rng: random.Random, and_back: bool = False) -> None:
    parameter = _parameter(run, rng)
    data = parameter.data
    parameter.data = torch.zeros(rng.randint(1, 9), dtype=rng.choice([torch.float32, torch.float64]))
    _use(run, parameter)
    if and_back:
        parameter.data = data


def _retype_model(run: VandalizedRun, rng: random.Random) -> None:
    run.model.to(rng.choice([torch.float64, torch.bfloat16]))
    for parameter in run.model.parameters():
        _use(run, parameter)


def _shrink(run: VandalizedRun, rng: random.Random) -> None:
    run.is_torn = True
    storage = _tensor(run, rng).untyped_storage()
    for _ in range(rng.randint(1, 4)):
        storage.resize_(rng.randint(0, max(storage.nbytes(), 1)))


def _grow(run: VandalizedRun, rng: random.Random) -> None:
    storage = _tensor(run, rng).untyped_storage()
    storage.resize_(storage.nbytes() + rng.randint(1, 4000))


def _swap(run: VandalizedRun, rng: random.Random) -> None:
    one, other = _parameter(run, rng), _parameter(run, rng)
    if one is not other:
        torch.utils.swap_tensors(one, other)


def _swap_outside(run: VandalizedRun, rng: random.Random) -> None:
    one = _parameter(run, rng)
    other = nn.Parameter(torch.randn_like(one))
    other.mark = "outside"
    torch.utils.swap_tensors(one, other)
    run.keep += [other] if rng.random() < 0.5 else []


def _swap_refused(run: VandalizedRun, rng: random.Random) -> None:
    """Have torch refuse when it has forbidden backward passes into the first: a view refers to the second."""
    one, other = rng.sample(list(run.model.parameters()), 2)
    view = other.view(-1)
    torch.utils.swap_tensors(one, other)
    del view


def _freeze_anew(run: VandalizedRun, rng: random.Random) -> None:
    run.model.requires_grad_(rng.random() < 0.5)
    run.keep += [hl.freeze(run.model), hl.clip_gradients(run.model, value=1e-9)]


def _order_of_hooks(run: VandalizedRun, rng: random.Random) -> None:
    hooks = run.model._forward_hooks
    if hooks:
        hooks.move_to_end(next(iter(hooks)))


HOOKS: dict[str, Callable[..., Any]] = {
    "forward": lambda m, a, o: o * 2,
    "backward": lambda m, i, o: None,
    "forward_pre": lambda m, a: None,
    "param_grad": lambda p: None,
}


def _attach(run: VandalizedRun, rng: random.Random) -> None:
    kind = rng.choice(list(HOOKS))
    run.keep.append(hl.attach(run.model, None, HOOKS[kind], on=kind))


def _torch_hooks(run: VandalizedRun, rng: random.Random) -> None:
    run.model.register_forward_hook(lambda m, a, o: o * 0)
    run.model.register_full_backward_hook(lambda *args: None)
    parameter = _parameter(run, rng)
    if parameter.requires_grad:
        parameter.register_hook(lambda grad: grad * 2)
        parameter.register_post_accumulate_grad_hook(lambda p: None)


@torch.no_grad()
def _write(run: VandalizedRun, rng: random.Random) -> None:
    _parameter(run, rng).fill_(rng.choice([0.0, float("nan"), float("inf"), 7.0]))


def _write_behind(run: VandalizedRun, rng: random.Random) -> None:
    if not run.is_torn:
        _tensor(run, rng).data.fill_(3)


def _write_numpy(run: VandalizedRun, rng: random.Random) -> None:
    if not run.is_torn:
        _tensor(run, rng).detach().numpy()[...] = 5


@torch.no_grad()
def _set(run: VandalizedRun, rng: random.Random) -> None:
    tensor = _tensor(run, rng)
    tensor.set_(torch.zeros(rng.randint(1, 8), dtype=tensor.dtype))


@torch.no_grad()
def _transpose(run: VandalizedRun, rng: random.Random) -> None:
    tensor = _tensor(run, rng)
    tensor.t_() if tensor.dim() < 3 else None


def _write_with_graph(run: VandalizedRun, rng: random.Random) -> None:
    buffers = [b for b in run.model.buffers() if b.is_floating_point()]
    if buffers and not run.is_torn:
        rng.choice(buffers).mul_(_parameter(run, rng).sum())


def _delete(run: VandalizedRun, rng: random.Random) -> None:
    module, name = _owner(run, rng)
    del module._parameters[name]
    run.model._buffers.pop("scale", None)


def _gradient(run: VandalizedRun, rng: random.Random) -> None:
    parameter = _parameter(run, rng)
    parameter.grad = None if rng.random() < 0.5 else torch.full_like(parameter, float("nan"))


def _gradient_data(run: VandalizedRun, rng: random.Random) -> None:
    grad = _parameter(run, rng).grad
    if grad is not None:
        grad.data = torch.zeros(2, dtype=grad.dtype)


def _optimizer(run: VandalizedRun, rng: random.Random) -> None:
    run.optimizer.state.clear()
    run.optimizer.param_groups[0]["params"].reverse()
    run.optimizer.param_groups[0]["lr"] = 1e6
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def _scaler(run: VandalizedRun, rng: random.Random) -> None:
    run.scaler.scale(torch.ones(1))
    run.scaler.update(new_scale=float(rng.randint(1, 9)))


def _load(run: VandalizedRun, rng: random.Random) -> None:
    if not run.is_torn:
        state = {name: torch.randn_like(value.float()) for name, value in run.model.state_dict().items()}
        run.model.load_state_dict(state, assign=rng.random() < 0.5, strict=False)


def _parametrize(run: VandalizedRun, rng: random.Random) -> None:
    linear = rng.choice([m for m in run.model.modules() if isinstance(m, nn.Linear)])
    parametrize.register_parametrization(linear, "weight", nn.Tanh(), unsafe=True)
    if rng.random() < 0.3:
        parametrize.remove_parametrizations(linear, "weight")


def _attributes(run: VandalizedRun, rng: random.Random) -> None:
    run.model.train(rng.random() < 0.5)
    run.model.junk = torch.ones(2)
    run.model.add_module("new", nn.Linear(2, 2))
    _parameter(run, rng).mark = 1
    if isinstance(run.model, Tied):
        run.model.history.append(1)
        run.model.history[1].zero_()
    run.model.__class__ = rng.choice([type(run.model), nn.Module])


def _array(run: VandalizedRun, rng: random.Random) -> None:
    table = getattr(run.model, "table", None)
    if table is not None:
        rng.choice([lambda: table.fill(9), lambda: table.resize(7, refcheck=False)])()


def _last(run: VandalizedRun, rng: random.Random) -> None:
    last = getattr(run.model, "last", None)
    if isinstance(last, Tensor) and not run.is_torn:
        rng.choice([lambda: last.zero_(), lambda: last.mul_(_parameter(run, rng).sum()), lambda: last.data.fill_(1)])()


SWITCHES: list[Callable[[], Any]] = [
    lambda: torch.set_autocast_enabled("cpu", True),
    lambda: torch.set_autocast_dtype("cpu", torch.float16),
    lambda: torch.set_autocast_cache_enabled(False),
    lambda: torch.set_default_device("meta"),
    lambda: torch.set_default_dtype(torch.float64),
    lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    lambda: torch.set_grad_enabled(False),
    lambda: torch.use_deterministic_algorithms(True),
    lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    lambda: torch.set_float32_matmul_precision("medium"),
    lambda: setattr(torch.backends.cudnn, "benchmark", True),
    lambda: torch.backends.mkldnn.set_flags(False),
]


def _streams(run: VandalizedRun, rng: random.Random) -> None:
    torch.rand(3)
    np.random.standard_normal(3)
    random.gauss(0, 1)
    next(iter(run.loader))
    if rng.random() < 0.3:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)


@torch.inference_mode()
def _infer(run: VandalizedRun, rng: random.Random) -> None:
    run.keep.append(run.forward())
    _parameter(run, rng).mul_(2)


def _stop(run: VandalizedRun, rng: random.Random) -> NoReturn:
    raise rng.choice([KeyboardInterrupt, Stop])("on purpose")


ACTS: dict[str, Act] = {
    "train": lambda run, rng: [run.step() for _ in range(rng.randint(1, 3))],
    "forward": lambda run, rng: run.keep.append(run.forward()),
    "reshape and back": functools.partial(_reshape, and_back=True),
    "freeze": lambda run, rng: run.keep.append(hl.freeze(run.model)),
    "clip": lambda run, rng: run.keep.append(hl.clip_gradients(run.model, value=1e-4)),
    "clip norm": lambda run, rng: nn.utils.clip_grad_norm_(run.model.parameters(), 0.01),
    "require": lambda run, rng: _parameter(run, rng).requires_grad_(rng.random() < 0.5),
    "resize": lambda run, rng: _tensor(run, rng).data.resize_(rng.randint(1, 40)),
    "replace": lambda run, rng: setattr(*_owner(run, rng), nn.Parameter(torch.ones(3))),
    "zero": lambda run, rng: run.optimizer.zero_grad(set_to_none=rng.random() < 0.5),
    "optimizer step": lambda run, rng: run.optimizer.step(),
    "reload optimizer": lambda run, rng: run.optimizer.load_state_dict(run.optimizer.state_dict()),
    "scheduler": lambda run, rng: run.scheduler.step(),
    "batch": lambda run, rng: run.batch[0].zero_(),
    "switches": lambda run, rng: rng.choice(SWITCHES)(),
    **{
        act.__name__.strip("_").replace("_", " "): act
        for act in (
            _retype, _reshape, _retype_model, _shrink, _grow, _swap, _swap_outside, _swap_refused, _freeze_anew,
            _order_of_hooks, _attach, _torch_hooks, _write,
            _write_behind, _write_numpy, _set, _transpose, _write_with_graph, _delete, _gradient, _gradient_data,
            _optimizer, _scaler, _load, _parametrize, _attributes, _array, _last, _streams, _infer, _stop,
        )
    },
}  # fmt: skip
COMPUTING = {
    "retype", "retype model", "write", "transpose", "parametrize", "train", "forward", "infer", "clip norm",
    "optimizer step", "reload optimizer", "zero",
}  # fmt: skip
"""Acts that read or write numbers of the run."""
STEPPING = {"train", "optimizer step"}
"""Acts that kill the process, with a guard or without, after ``set_`` has torn a tensor of the optimizer; of a fused
optimizer also after `swap_tensors` of two parameters, as it writes by their sizes into states of other sizes."""

# -- cases ----------------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What came of a case."""

    number: int
    model: str
    optimizer: str
    is_graph_alive: bool
    acts: list[str] = field(default_factory=list)
    said: str = ""
    """The error by which the guard said that something could not be put back."""
    wrong: list[str] = field(default_factory=list)
    """What was otherwise afterwards, though nothing was said."""


def run_case(number: int) -> Verdict:
    """Run one case, and return what came of it."""
    rng = random.Random(number)
    kind = rng.choice(sorted(MODELS)), rng.choice(sorted(OPTIMIZERS)), rng.random() < 0.6
    verdict, run, num_firings = Verdict(number, *kind), VandalizedRun(*kind), rng.randint(1, 2)
    guard = guard_of(run)
    for firing in range(num_firings):
        if firing:
            verdict.wrong += _errors(run.train)
        before = portrait(run)
        guard.save(batch=run.batch)
        for _ in range(rng.randint(1, 2)):
            names = [rng.choice(sorted(ACTS)) for _ in range(rng.randint(3, 10))]
            _vandalize(run, guard, rng, verdict, names)
            verdict.wrong += differing(before, portrait(run))
            if verdict.said or verdict.wrong:
                break
        guard.release()
        if verdict.said or verdict.wrong:
            num_firings = firing + 1
            break
    if "swap_tensors" not in verdict.said:  # which says that a backward pass is forbidden
        stream, expected = torch.get_rng_state(), _twin(*kind, num_firings)
        torch.set_rng_state(stream)
        verdict.wrong += _errors(run.train_on, expected)
    return verdict


def run_act(name: str, is_graph_alive: bool) -> tuple[list[str], list[list[str]]]:
    """Do one act in each of two firings; return what was otherwise afterwards, and what the receipts named."""
    kind = "views" if is_graph_alive else "tied", "adam", is_graph_alive
    run, rng, touched = VandalizedRun(*kind), random.Random(1), []
    guard, verdict = guard_of(run), Verdict(0, *kind)
    for _ in range(2):  # the second firing goes by what was noted at the first
        before = portrait(run)
        guard.save(batch=run.batch)
        named = _vandalize(run, guard, rng, verdict, [name])
        touched.append(sorted(re.sub(r"\[-?\d+\]", "[#]", each) for each in named))  # ids, numbers of hooks
        guard.release()
        verdict.wrong += differing(before, portrait(run))
    if "swap_tensors" not in verdict.said:
        stream, expected = torch.get_rng_state(), _twin(*kind, 1)
        torch.set_rng_state(stream)
        verdict.wrong += _errors(run.train_on, expected)
    return verdict.wrong, touched


def _vandalize(
    run: VandalizedRun, guard: Guard, rng: random.Random, verdict: Verdict, names: list[str]
) -> tuple[str, ...]:
    """Do the acts of these names in a protected block; return what its receipt says was touched."""
    run.is_torn = False
    receipt = None
    try:
        with guard.protecting("vandal") as receipt, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _act(run, rng, verdict.acts, names)
    except hl.errors.GuardError as error:
        verdict.said = str(error)
    except (KeyboardInterrupt, Stop):
        pass
    return () if receipt is None else receipt.touched


def _act(run: VandalizedRun, rng: random.Random, done: list[str], names: list[str]) -> None:
    tearing = {"set", "swap"} if run.optimizer.defaults.get("fused") else {"set"}
    for name in names:
        if (name in COMPUTING and not run.can_compute) or (name in STEPPING and tearing.intersection(done)):
            continue
        done.append(name)
        try:
            ACTS[name](run, rng)
        except Stop:
            raise
        except Exception:  # an act that cannot be done after the others
            done[-1] += " (refused)"


@functools.cache
def _twin(model: str, optimizer: str, is_graph_alive: bool, num_firings: int) -> list[bytes]:
    """Return the weights of an untouched run of that kind, when it has been trained on."""
    run = VandalizedRun(model, optimizer, is_graph_alive)
    run.train(num_firings - 1)
    return run.train_on()


def _errors(train: Callable[[], Any], expected: Any = None) -> list[str]:
    """Return in words that a run cannot be trained, or ends otherwise than ``expected``."""
    try:
        return [] if train() == expected else ["training afterwards"]
    except Exception as error:
        return [f"training afterwards: {type(error).__name__}: {error}"]


# -- for the torture ------------------------------------------------------------------------------------------------


def _tell(number: int) -> Case:
    verdict = run_case(number)
    return Case(number, len(verdict.acts), verdict.wrong, verdict.said, {"runs": 1})


PART = Part(
    name="interventions",
    does="nasty acts inside guarded blocks (retype, resize, swap, train, load, hook, raise …), then train on",
    holds="bits",
    goal=10_000,
    quick=350,
    run_case=_tell,
    prepare=lambda: VandalizedRun("tied", "adam"),  # what torch imports late, it imports once
    batch=250,
)
