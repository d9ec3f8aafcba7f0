"""Random vandalism inside a guarded block, case by case: what is lost, what is said, what is silent.

A case is a number: it decides the model, the optimizer and 3 to 10 nasty acts. Its run is made twice, with the guarded
block and without, and both are trained on. Cases run in child processes, so that one that kills the interpreter is
counted and named. From the repository's root::

    python tests/guard/vandals.py --cases 10000          # a quarter of an hour
    python tests/guard/vandals.py --only 4711            # one case, in this process
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import random
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl
from hookline.guard.guard import Guard

__all__ = ["ACTS", "Verdict", "run_batch", "run_case"]

# -- runs -----------------------------------------------------------------------------------------------------------


class Dense(nn.Module):
    """Batch normalization, dropout, a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for ``x``."""
        return self.out(self.drop(self.second(self.norm(self.first(x)).relu())))


class Views(nn.Module):
    """Buffers that are views of parameters, with and without autograd's knowledge, and views of one another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.register_buffer("corner", self.inner.weight.detach()[:2])
        self.register_buffer("row", self.other.weight.data[1])
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("evens", self.scale[::2])
        self.table = np.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for ``x``."""
        return self.other(self.inner(x).tanh() * self.scale) + self.corner.sum() + self.evens.sum()


class Recurrent(nn.Module):
    """A recurrent layer, whose kernel keeps its inputs and outputs, and the last state as an attribute."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(4, 5, batch_first=True)
        self.out = nn.Linear(5, 3)
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for ``x``, a row being a sequence of two."""
        found, _ = self.rnn(torch.stack([x, x * 2], 1))
        self.last = found.detach()[:, -1]
        return self.out(found[:, -1])


class Frozen(nn.Module):
    """A part that takes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for ``x``."""
        return self.head(self.norm(self.back(x).relu()))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": Dense,
    "views": Views,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "frozen": Frozen,
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True, foreach=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
}


class Run:
    """A model, its optimizer, its data; two steps are behind it, and the graph of a third may be alive."""

    def __init__(self, model: str, optimizer: str, is_graph_alive: bool = True) -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        self.model = MODELS[model]()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[optimizer](trained)
        self.data = TensorDataset(torch.randn(12, 4), torch.randn(12, 1))
        self.array = np.random.rand(6, 4).astype(np.float32)
        self.loader = DataLoader(self.data, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(1))
        self.batch = next(iter(self.loader))
        self.keep: list[Any] = []
        """What the vandal keeps alive."""
        self.is_torn = False
        """Whether a tensor has less memory than it reads: to compute with it would be the vandal's own crash."""
        self.shapes = [parameter.shape for parameter in self.model.parameters()]
        self.step()
        self.step()
        self.loss = self.forward() if is_graph_alive else None

    @property
    def can_compute(self) -> bool:
        """Whether computing is no crash of the vandal's own: recurrent kernels do not check the shapes of weights."""
        shapes = [parameter.shape for parameter in self.model.parameters()]
        return not self.is_torn and (not isinstance(self.model, Recurrent) or shapes == self.shapes)

    def forward(self) -> Tensor:
        """Return the loss of the batch."""
        return self.model(self.batch[0]).square().mean()

    def step(self, loss: Tensor | None = None) -> None:
        """Make one step, with ``loss`` if it was computed before."""
        loss = self.forward() if loss is None else loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def train_on(self) -> None:
        """Finish the step whose graph is alive, then make three more, unfreezing everything for the last."""
        self.step(self.loss)
        self.step()
        self.step()
        for parameter in self.model.parameters():
            parameter.requires_grad_(True)
        self.step()


# -- a portrait, told without the guard's help -------------------------------------------------------------------------


def portrait(run: Run) -> dict[str, Any]:
    """Return by name everything that decides how the run goes on."""
    seen: dict[str, Any] = {}
    for name, module in run.model.named_modules(remove_duplicate=False):
        seen[f"{name} class"] = type(module)
        for key, value in vars(module).items():
            seen[f"{name}.{key}"] = _value(value)
        for key, tensor in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
            if isinstance(tensor, Tensor):
                seen[f"{name}.{key} tensor"] = _tensor(tensor)
    for number, (parameter, state) in enumerate(run.optimizer.state.items()):
        seen[f"state {number}"] = id(parameter), [(key, _value(value)) for key, value in state.items()]
        for key, value in state.items():
            if isinstance(value, Tensor):
                seen[f"state {number} {key}"] = _tensor(value)
    for number, group in enumerate(run.optimizer.param_groups):
        seen[f"group {number}"] = id(group), [(key, _value(value)) for key, value in group.items()]
    for number, tensor in enumerate([*run.batch, *run.data.tensors]):
        seen[f"data {number}"] = _bytes(tensor)
    seen["torch's stream"] = torch.get_rng_state().numpy().tobytes()
    seen["NumPy's stream"] = str(np.random.get_state())
    seen["Python's stream"] = random.getstate()
    seen["loader's stream"] = run.loader.generator.get_state().numpy().tobytes()
    return seen | switches()


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


def _tensor(tensor: Tensor) -> Any:
    grad = tensor.grad if tensor.is_leaf else None
    return (
        id(tensor),
        type(tensor),
        tensor.data_ptr() - tensor.untyped_storage().data_ptr(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor._version,
        _bytes(tensor),
        sorted(vars(tensor)),
        len(tensor._backward_hooks or ()),
        len(tensor._post_accumulate_grad_hooks or ()),
        None if grad is None else (id(grad), grad._version, _bytes(grad)),
    )


def _bytes(tensor: Tensor) -> bytes:
    # A copy: torch forbids to resize the memory of what was shown to NumPy once.
    return tensor.detach().clone().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, id(item)) for key, item in value.items()]
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if isinstance(value, list):
        return [id(item) for item in value]
    return repr(value) if isinstance(value, int | float | str | bool | None) else id(value)


# -- acts -----------------------------------------------------------------------------------------------------------

Act = Callable[[Run, random.Random], Any]
ACTS: dict[str, Act] = {}
READING: set[str] = set()
"""Acts that read or write the numbers of the model."""


def _act(function: Act) -> Act:
    ACTS[function.__name__.strip("_")] = function
    return function


def _computing(function: Act) -> Act:
    READING.add(function.__name__.strip("_"))
    return _act(function)


def _parameter(run: Run, rng: random.Random) -> nn.Parameter:
    found = list(run.model.parameters())
    return rng.choice(found)


def _any_tensor(run: Run, rng: random.Random) -> Tensor:
    grads = [p.grad for p in run.model.parameters() if p.grad is not None]
    states = [v for s in run.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    pool = [list(run.model.parameters()), list(run.model.buffers()), grads, states]
    return rng.choice(rng.choice([each for each in pool if each]))


def _used(run: Run, parameter: Tensor) -> None:
    """Keep a graph in which a parameter has the shape and dtype of now."""
    if not run.is_torn:
        run.keep.append((parameter * 2).sum())


@_computing
def _retype(run: Run, rng: random.Random) -> None:
    parameter = _parameter(run, rng)
    parameter.data = parameter.data.to(rng.choice([torch.bfloat16, torch.float64, torch.float16]))
    _used(run, parameter)


@_act
def _reshape(run: Run, rng: random.Random) -> None:
    parameter = _parameter(run, rng)
    parameter.data = torch.zeros(rng.randint(1, 9), dtype=rng.choice([torch.float32, torch.float64]))
    _used(run, parameter)


@_act
def _reshape_and_back(run: Run, rng: random.Random) -> None:
    parameter = _parameter(run, rng)
    data = parameter.data
    parameter.data = torch.zeros(rng.randint(1, 9))
    _used(run, parameter)
    parameter.data = data


@_computing
def _retype_model(run: Run, rng: random.Random) -> None:
    run.model.to(rng.choice([torch.float64, torch.bfloat16]))
    for parameter in run.model.parameters():
        _used(run, parameter)


@_act
def _shrink(run: Run, rng: random.Random) -> None:
    run.is_torn = True
    storage = _any_tensor(run, rng).untyped_storage()
    for _ in range(rng.randint(1, 4)):
        storage.resize_(rng.randint(0, max(storage.nbytes(), 1)))


@_act
def _grow(run: Run, rng: random.Random) -> None:
    storage = _any_tensor(run, rng).untyped_storage()
    storage.resize_(storage.nbytes() + rng.randint(1, 4000))


@_act
def _swap(run: Run, rng: random.Random) -> None:
    one, other = _parameter(run, rng), _parameter(run, rng)
    if one is not other:
        torch.utils.swap_tensors(one, other)


@_act
def _swap_outside(run: Run, rng: random.Random) -> None:
    one = _parameter(run, rng)
    other = nn.Parameter(torch.randn_like(one))
    other.mark = "outside"
    torch.utils.swap_tensors(one, other)
    if rng.random() < 0.5:
        run.keep.append(other)


@_act
def _freeze(run: Run, rng: random.Random) -> None:
    run.keep.append(hl.freeze(run.model))


@_act
def _clip(run: Run, rng: random.Random) -> None:
    run.keep.append(hl.clip_gradients(run.model, value=1e-4))


@_act
def _attach(run: Run, rng: random.Random) -> None:
    kind = rng.choice(["forward", "backward", "forward_pre", "param_grad"])
    hook = {
        "forward": lambda m, a, o: o * 2,
        "backward": lambda m, i, o: None,
        "forward_pre": lambda m, a: None,
        "param_grad": lambda p: None,
    }[kind]
    run.keep.append(hl.attach(run.model, None, hook, on=kind))


@_act
def _torch_hooks(run: Run, rng: random.Random) -> None:
    run.model.register_forward_hook(lambda m, a, o: o * 0)
    parameter = _parameter(run, rng)
    if parameter.requires_grad:
        parameter.register_hook(lambda grad: grad * 2)
        parameter.register_post_accumulate_grad_hook(lambda p: None)


@_act
def _require(run: Run, rng: random.Random) -> None:
    _parameter(run, rng).requires_grad_(rng.random() < 0.5)


@_computing
def _write(run: Run, rng: random.Random) -> None:
    with torch.no_grad():
        _parameter(run, rng).fill_(rng.choice([0.0, float("nan"), float("inf"), 7.0]))


@_act
def _write_behind(run: Run, rng: random.Random) -> None:
    if not run.is_torn:
        _any_tensor(run, rng).data.fill_(3)


@_act
def _write_numpy(run: Run, rng: random.Random) -> None:
    if not run.is_torn:
        _any_tensor(run, rng).detach().numpy()[...] = 5


@_act
def _set(run: Run, rng: random.Random) -> None:
    tensor = _any_tensor(run, rng)
    with torch.no_grad():
        tensor.set_(torch.zeros(rng.randint(1, 8), dtype=tensor.dtype))


@_computing
def _transpose(run: Run, rng: random.Random) -> None:
    tensor = _any_tensor(run, rng)
    with torch.no_grad():
        tensor.t_() if tensor.dim() < 3 else None


@_act
def _resize(run: Run, rng: random.Random) -> None:
    _any_tensor(run, rng).data.resize_(rng.randint(1, 40))


@_act
def _write_with_graph(run: Run, rng: random.Random) -> None:
    buffers = [b for b in run.model.buffers() if b.is_floating_point()]
    if buffers and not run.is_torn:
        rng.choice(buffers).mul_(_parameter(run, rng).sum())


@_act
def _delete(run: Run, rng: random.Random) -> None:
    module = rng.choice([m for m in run.model.modules() if m._parameters])
    del module._parameters[rng.choice(list(module._parameters))]


@_act
def _replace(run: Run, rng: random.Random) -> None:
    module = rng.choice([m for m in run.model.modules() if m._parameters])
    name = rng.choice(list(module._parameters))
    setattr(module, name, nn.Parameter(torch.ones(3)))


@_act
def _gradient(run: Run, rng: random.Random) -> None:
    parameter = _parameter(run, rng)
    parameter.grad = None if rng.random() < 0.5 else torch.full_like(parameter, float("nan"))


@_act
def _gradient_data(run: Run, rng: random.Random) -> None:
    grad = _parameter(run, rng).grad
    if grad is not None:
        grad.data = torch.zeros(2, dtype=grad.dtype)


@_act
def _optimizer(run: Run, rng: random.Random) -> None:
    run.optimizer.state.clear()
    run.optimizer.param_groups[0]["params"].reverse()
    run.optimizer.param_groups[0]["lr"] = 1e6
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@_act
def _load(run: Run, rng: random.Random) -> None:
    if not run.is_torn:
        state = {name: torch.randn_like(value.float()) for name, value in run.model.state_dict().items()}
        run.model.load_state_dict(state, assign=rng.random() < 0.5, strict=False)


@_computing
def _parametrize(run: Run, rng: random.Random) -> None:
    linear = rng.choice([m for m in run.model.modules() if isinstance(m, nn.Linear)])
    parametrize.register_parametrization(linear, "weight", nn.Tanh(), unsafe=True)


@_act
def _attributes(run: Run, rng: random.Random) -> None:
    run.model.train(rng.random() < 0.5)
    run.model.junk = torch.ones(2)
    _parameter(run, rng).mark = 1
    run.model.__class__ = rng.choice([type(run.model), nn.Module])


@_act
def _array(run: Run, rng: random.Random) -> None:
    table = getattr(run.model, "table", None)
    if table is not None:
        rng.choice([lambda: table.fill(9), lambda: table.resize(7, refcheck=False)])()


@_act
def _last(run: Run, rng: random.Random) -> None:
    last = getattr(run.model, "last", None)
    if isinstance(last, Tensor) and not run.is_torn:
        rng.choice([lambda: last.zero_(), lambda: last.mul_(_parameter(run, rng).sum()), lambda: last.data.fill_(1)])()


@_act
def _batch(run: Run, rng: random.Random) -> None:
    run.batch[0].zero_()


@_act
def _data(run: Run, rng: random.Random) -> None:
    rng.choice(run.data.tensors).fill_(4)


@_act
def _switches(run: Run, rng: random.Random) -> None:
    acts: list[Callable[[], Any]] = [
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
    rng.choice(acts)()


@_act
def _streams(run: Run, rng: random.Random) -> None:
    torch.rand(3)
    np.random.standard_normal(3)
    random.gauss(0, 1)
    torch.rand(1, generator=run.loader.generator)


@_computing
def _train(run: Run, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 3)):
        run.step()


@_computing
def _forward(run: Run, rng: random.Random) -> None:
    run.keep.append(run.forward())


@_computing
def _infer(run: Run, rng: random.Random) -> None:
    with torch.inference_mode():
        run.keep.append(run.forward())
        _parameter(run, rng).mul_(2)


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
    verdict, run = Verdict(number, *kind), Run(*kind)
    stream = torch.get_rng_state()
    before = portrait(run)
    guard = Guard(run.model, run.optimizer, loader=run.loader)
    guard.save(batch=run.batch)
    try:
        with guard.protecting("vandal"):
            _vandalize(run, rng, verdict)
    except hl.errors.GuardError as error:
        verdict.said = str(error)
    guard.release()
    verdict.wrong = [name for name in _differing(before, portrait(run)) if not _is_named(name, verdict.said)]
    if "swap_tensors" not in verdict.said:  # which says that a backward pass is forbidden
        torch.set_rng_state(stream)
        verdict.wrong += _trained_on(run)
        verdict.wrong += [] if verdict.wrong or _weights(run) == _twin(*kind) else ["training afterwards"]
    return verdict


@functools.cache
def _twin(model: str, optimizer: str, is_graph_alive: bool) -> list[bytes]:
    """Return the weights of a run of that kind that nobody has touched, when it has been trained on."""
    run = Run(model, optimizer, is_graph_alive)
    run.train_on()
    return _weights(run)


def _is_named(name: str, said: str) -> bool:
    """Return whether an error has named what is otherwise: the data, of which the batch is a copy."""
    return name in ("data 2", "data 3") and f"loader.dataset.tensors[{int(name[-1]) - 2}]" in said


def _trained_on(run: Run) -> list[str]:
    try:
        run.train_on()
    except Exception as error:
        return [f"training afterwards: {type(error).__name__}: {error}"]
    return []


def _weights(run: Run) -> list[bytes]:
    return [_bytes(tensor) for tensor in run.model.state_dict().values()]


def _vandalize(run: Run, rng: random.Random, verdict: Verdict) -> None:
    chosen = [rng.choice(sorted(ACTS)) for _ in range(rng.randint(3, 10))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in chosen:
            if name in READING and not run.can_compute:
                continue
            verdict.acts.append(name)
            try:
                ACTS[name](run, rng)
            except Exception:  # an act that cannot be done after the others
                verdict.acts[-1] += " (refused)"


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in {**one, **other} if name not in one or name not in other or one[name] != other[name]]


# -- batches --------------------------------------------------------------------------------------------------------


def run_batch(first: int, count: int) -> tuple[list[dict[str, Any]], int | None]:
    """Run cases in a child process; return their verdicts, and the number of the case that killed it, if one did.

    The child is forked: importing torch again takes four seconds, a case 40 ms.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(ours)
        _child(first, count, theirs)
    os.close(theirs)
    with open(ours) as lines:
        verdicts = [json.loads(line) for line in lines if line.endswith("\n")]
    status = os.waitpid(child, 0)[1]
    if status == 0 and len(verdicts) == count:
        return verdicts, None
    print(f"case {first + len(verdicts)} ended its process, status {status}", file=sys.stderr)
    return verdicts, first + len(verdicts)


def _child(first: int, count: int, pipe: int) -> NoReturn:
    faulthandler.enable()
    status = 1
    try:
        with open(pipe, "w") as out:
            for number in range(first, first + count):
                print(json.dumps(vars(run_case(number))), file=out, flush=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def run_all(cases: int, first: int = 0, batch: int = 250) -> tuple[list[dict[str, Any]], list[int]]:
    """Run many cases, going on behind each that kills its process; return the verdicts and who did."""
    Run("dense", "adam")  # what torch imports late, it imports once
    verdicts: list[dict[str, Any]] = []
    dead: list[int] = []
    at, end = first, first + cases
    while at < end:
        found, died = run_batch(at, min(batch, end - at))
        verdicts += found
        at = at + min(batch, end - at) if died is None else died + 1
        if died is not None:
            dead.append(died)
        if len(verdicts) % 1000 < batch:
            print(f"{at - first} of {cases}", file=sys.stderr, flush=True)
    return verdicts, dead


def main() -> int:
    """Run what the command line asks for; return 1 if something was lost or silent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    if options.only is not None:
        print(json.dumps(vars(run_case(options.only)), indent=2))
        return 0
    verdicts, dead = run_all(options.cases, options.first)
    wrong = [verdict for verdict in verdicts if verdict["wrong"]]
    said = Counter(verdict["said"].split(" has ")[-1][:80] for verdict in verdicts if verdict["said"])
    print(f"{len(verdicts)} cases, {sum(len(v['acts']) for v in verdicts)} acts: {len(wrong)} wrong, {len(dead)} dead")
    print(f"said: {sum(said.values())} {said.most_common(8)}")
    for verdict in wrong[:40]:
        print(json.dumps(verdict)[:600])
    return 1 if wrong or dead else 0


if __name__ == "__main__":
    raise SystemExit(main())
