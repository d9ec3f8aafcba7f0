"""Random training programs, watched and unwatched: model, optimizer, loop and instruments are drawn from a number.

The same program trains twice from the same seed, once with random instruments of hookline on random places, put on and
taken off in the middle, and once without. Every loss, weight, buffer, number of the optimizer and random stream must
be the same bit for bit, and what was captured must be what a hand-written hook of torch sees. Each twentieth program
carries a hook that draws one random number without a guard: that one must be found, or the comparison is blind.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from helpers_cases import Case, Part
from program_models import MODELS, Swish
from torch import Tensor, nn
from torch.optim import Optimizer

import hookline as hl
from hookline import debug

__all__ = ["PART"]

KINDS = ["forward_pre", "forward", "backward_pre", "backward"]
STEPS = 4
BLIND = 20
"""Each so-manieth program is a negative control."""

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-3),
    "radam": lambda p: torch.optim.RAdam(p, 1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, 1e-3),
}


@dataclass(frozen=True)
class Program:
    """What a training program is made of. The same number makes the same one."""

    number: int
    model: str
    optimizer: str
    accumulate: int
    clip: float | None
    is_autocast: bool
    is_frozen: bool
    set_to_none: bool
    is_evaluated: bool
    draws: bool
    """Whether the loop itself draws from Python's, NumPy's and torch's streams."""
    schedule: bool

    @classmethod
    def of(cls, number: int) -> Program:
        """Draw a program."""
        rng = random.Random(number)
        return cls(
            number=number,
            model=rng.choice(sorted(MODELS)),
            optimizer=rng.choice(sorted(OPTIMIZERS)),
            accumulate=rng.choice([1, 1, 2]),
            clip=rng.choice([None, 0.5]),
            is_autocast=rng.random() < 0.3,
            is_frozen=rng.random() < 0.3,
            set_to_none=rng.random() < 0.7,
            is_evaluated=rng.random() < 0.3,
            draws=rng.random() < 0.5,
            schedule=rng.random() < 0.3,
        )


@dataclass
class Training:
    """A program that can be run: its parts, made anew from its seed."""

    program: Program

    def __post_init__(self) -> None:
        seed = self.program.number
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        made = MODELS[self.program.model]
        self.model, self.batch = made.make(), made.batch
        if self.program.is_frozen:
            next(self.model.parameters()).requires_grad_(False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[self.program.optimizer](trained)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9) if self.program.schedule else None
        self.losses: list[Tensor] = []

    def loss(self) -> Tensor:
        """Return the loss of a fresh batch."""
        inputs = self.batch()
        with torch.autocast("cpu", torch.bfloat16) if self.program.is_autocast else nullcontext():
            found = self.model(*inputs)
        return F.mse_loss(found.float(), torch.zeros_like(found, dtype=torch.float32))

    def step(self) -> None:
        """Make one step of the optimizer."""
        if self.program.draws:
            self.losses.append(torch.rand(1) + float(np.random.rand()) + random.random())
        for _ in range(self.program.accumulate):
            loss = self.loss() / self.program.accumulate
            loss.backward()
            self.losses.append(loss.detach().clone())
        if self.program.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.program.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.program.set_to_none)
        if self.scheduler is not None:
            self.scheduler.step()
        if self.program.is_evaluated:
            self.model.eval()
            with torch.no_grad():
                self.losses.append(self.loss())
            self.model.train()

    def portrait(self) -> dict[str, Any]:
        """Return by name everything that decides how the run goes on, and its losses."""
        states = {f"state {n} {k}": v for n, s in enumerate(self.optimizer.state.values()) for k, v in s.items()}
        return {
            **{f"weight {name}": value.clone() for name, value in self.model.state_dict().items()},
            **{f"gradient {name}": p.grad for name, p in self.model.named_parameters()},
            **states,
            **{f"loss {n}": loss for n, loss in enumerate(self.losses)},
            "stream of torch": torch.get_rng_state(),
            "stream of numpy": np.random.get_state()[1],
            "stream of python": random.getstate(),
        }


# -- instruments ----------------------------------------------------------------------------------------------------

Instrument = Callable[[Training, random.Random, "Seen"], Any]


class Seen:
    """What captures saw, beside what hand-written hooks of torch saw at the same places."""

    def __init__(self) -> None:
        self.compared = 0
        self.refused = 0
        """Outputs that a module wrote over in place: the capture says so instead of returning what is there now."""
        self.wrong: list[str] = []

    def compare(self, name: str, by_hand: Tensor, call: Any) -> None:
        """Compare one output."""
        try:
            self.wrong += [] if _same(by_hand, call.output.detach()) else [f"capture of {name}"]
            self.compared += 1
        except hl.errors.CaptureError:
            self.refused += 1


def _some(model: nn.Module, rng: random.Random) -> list[str]:
    """Return names of some modules that return one tensor."""
    names = [name for name, module in model.named_modules() if name and not list(module.children())]
    return rng.sample(names, rng.randint(1, len(names)))


def _watch(t: Training, rng: random.Random, seen: Seen) -> Any:
    kinds = rng.sample(["forward", "backward", "param_grad", "param"], rng.randint(1, 4))
    stats = rng.choice([None, "norm", ["mean", "std", "absmax"], "histogram"])
    return hl.watch(t.model, "*", on=kinds, stats=stats, every=rng.randint(1, 3), optimizer=t.optimizer)


def _reads(*shown: Any) -> None:
    """Read every tensor that a hook of any kind is shown, with operators of its own; return nothing."""
    for value in shown:
        if isinstance(value, tuple | list):
            _reads(*value)
        elif isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            value.detach().double().square().mean()


def _junk(*shown: Any) -> str:
    """Read the same, and return what nobody may take: for hooks that only observe."""
    _reads(*shown)
    return "to be ignored"


def _observe(t: Training, rng: random.Random, seen: Seen) -> Any:
    kind, observe = rng.choice(KINDS), rng.random() < 0.5
    return hl.attach(t.model, _some(t.model, rng), _junk if observe else _reads, on=kind, observe=observe)


def _everywhere(t: Training, rng: random.Random, seen: Seen) -> Any:
    return hl.attach_everywhere(_junk, on=rng.choice(KINDS), observe=True)


def _functions(t: Training, rng: random.Random, seen: Seen) -> Any:
    target = rng.choice(["*", "torch.Tensor.*", "torch.*", "aten.*", Swish])
    kind = rng.choice(KINDS[:2] if target == "aten.*" else KINDS)
    observe, within = rng.random() < 0.5, rng.choice([t.model, None])
    hook = _junk if observe else _reads
    return hl.attach_function(target, hook, on=kind, within=within, observe=observe, strict=False)


def _tensors(t: Training, rng: random.Random, seen: Seen) -> Any:
    trained = [p for p in t.model.parameters() if p.requires_grad]
    return hl.HandleSet(
        [
            *(hl.attach_tensor(parameter, _junk, observe=True) for parameter in trained),
            hl.attach_node(trained[0], _junk, on="pre", observe=True),
            hl.attach_tensor(trained, _reads),
        ]
    )


def _parameters(t: Training, rng: random.Random, seen: Seen) -> Any:
    return hl.attach(t.model, None, _reads, on="param_grad")


def _steps(t: Training, rng: random.Random, seen: Seen) -> Any:
    kind = rng.choice(["step_pre", "step_post"])
    return hl.attach_optimizer(t.optimizer, _reads, on=kind, observe=kind == "step_pre" and rng.random() < 0.5)


@contextmanager
def _trace(t: Training, rng: random.Random, seen: Seen) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder, hl.trace(t.model, to=f"{folder}/trace", step=t.optimizer):
        yield


def _find_bad(t: Training, rng: random.Random, seen: Seen) -> Any:
    return debug.find_bad_operations(t.model, t.optimizer, every=rng.randint(1, 4))


class Draws(hl.TrainingHook):
    """Draws from every stream; the manager puts them back."""

    name = "draws"
    hook_points = {hl.HookPoint.POST_STEP}

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        return {"drawn": torch.rand(3).sum() + float(np.random.rand()) + random.random()}


class Vandal(hl.InterventionHook):
    """Ruins the weights; the guard puts them back."""

    name = "vandal"
    hook_points = {hl.HookPoint.POST_STEP}

    def intervene(self, run_ctx: Any, model_ctx: Any) -> dict[str, Any]:
        with torch.no_grad():
            for parameter in model_ctx.model.parameters():
                parameter.normal_()
        return {"ruined": 1.0}


def _follow(t: Training, rng: random.Random, seen: Seen) -> Any:
    hooks: list[Any] = [Draws()] + ([Vandal()] if rng.random() < 0.5 else [])
    return hl.follow(t.model, t.optimizer, hooks, sinks=[], accumulate=t.program.accumulate)


@contextmanager
def _capture(t: Training, rng: random.Random, seen: Seen) -> Iterator[Any]:
    """Capture some outputs, and have plain hooks of torch copy the same."""
    names, found = _some(t.model, rng), {}

    def keep(name: str, output: Any) -> None:
        found[name] = output.detach().clone() if isinstance(output, Tensor) else None

    handles = [
        t.model.get_submodule(name).register_forward_hook(lambda m, a, o, name=name: keep(name, o)) for name in names
    ]
    is_graph_kept = rng.random() < 0.3
    with hl.capture(t.model, names, clone=rng.random() < 0.5, detach=not is_graph_kept, strict=False) as cache:
        yield
    for handle in handles:
        handle.remove()
    for name in names:
        if found.get(name) is not None:
            seen.compare(name, found[name], cache[name].calls[-1])


INSTRUMENTS: dict[str, Instrument] = {
    "watch": _watch,
    "observe": _observe,
    "everywhere": _everywhere,
    "functions": _functions,
    "tensors": _tensors,
    "parameters": _parameters,
    "steps": _steps,
    "trace": _trace,
    "find bad operations": _find_bad,
    "follow": _follow,
    "capture": _capture,
    "saved tensors": lambda t, rng, seen: hl.saved_tensors(pack=lambda x: x, unpack=lambda x: x),
}


def _run_watched(program: Program, rng: random.Random, *, is_blind_test: bool) -> tuple[Training, Seen, list[str]]:
    """Train with instruments that come and go; return the training, the captures and what was put on."""
    training, seen, names = Training(program), Seen(), []
    is_drawing = iter([is_blind_test])
    for _ in range(2):
        with ExitStack() as stack:
            for name in rng.sample(sorted(INSTRUMENTS), rng.randint(1, 4)):
                instrument = INSTRUMENTS[name](training, rng, seen)
                if instrument is not None:
                    stack.enter_context(instrument)
                names.append(name)
            if next(is_drawing, False):
                stack.enter_context(hl.attach(training.model, None, lambda m, a, o: torch.rand(1) and None))
            for _ in range(STEPS // 2):
                training.step()
    return training, seen, names


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same_kind = (one.dtype, one.shape) == (other.dtype, other.shape)
        return same_kind and torch.equal(_bits(one), _bits(other))
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def run_case(number: int) -> Case:
    """Train a program twice, and tell what is not the same."""
    program, is_blind_test = Program.of(number), number % BLIND == BLIND - 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bare = Training(program)
        for _ in range(STEPS):
            bare.step()
        expected = bare.portrait()
        watched, seen, names = _run_watched(program, random.Random(number + 1), is_blind_test=is_blind_test)
    found = watched.portrait()
    wrong = [name for name in expected | found if not _same(expected.get(name), found.get(name))]
    wrong += seen.wrong
    wrong += [f"hooks left on {module}" for module in _hooked(watched.model)]
    counts = {
        "captures compared": seen.compared,
        "captures refused": seen.refused,
        **{f"with {name}": 1 for name in set(names)},
    }
    if is_blind_test:
        counts["controls found"] = int(bool(wrong))
        return Case(number, 1, [] if wrong else ["the negative control was not found"], "", counts)
    return Case(number, 1, [f"{program}: {names}: {', '.join(wrong[:4])}"] if wrong else [], "", counts)


def prepare() -> None:
    """Have torch import what it imports late, and take the kernel that hooks do not change."""
    torch.backends.mha.set_fastpath_enabled(False)
    run_case(0)


def _hooked(model: nn.Module) -> list[str]:
    try:
        hl.assert_no_hooks(model)
    except AssertionError as error:
        return [str(error)[:100]]
    return []


PART = Part(
    name="programs",
    does="random training programs under random instruments, put on and taken off midway, against the same bare",
    holds="bits and captures",
    goal=2_000,
    quick=60,
    run_case=run_case,
    prepare=prepare,
)
