"""What holds for every built-in observer: it changes nothing, resumes, says what it returns, and takes any model."""

from __future__ import annotations

import copy
import functools
import math
import re
import warnings

import pytest
import torch
from helpers_analyses import CLASSES, GPU, OBSERVERS, context, made, new_manager, random_grads, token_experiment
from helpers_loops import left_by
from helpers_training import differences
from torch import nn

import hookline as hl
from hookline import analyses
from hookline.analyses._base import Analysis
from hookline.errors import HooklineWarning
from hookline.lifecycle.registry import register_built_ins
from hookline.tree import copied

POST_STEP, POST_EPOCH, SNAPSHOT = hl.HookPoint.POST_STEP, hl.HookPoint.POST_EPOCH, hl.HookPoint.SNAPSHOT


def run_epochs(manager, first=0, last=5, experiment=None, device="cpu"):
    experiment = experiment or token_experiment(device)
    hl.epoch_loop(experiment, epochs=last, manager=manager, snapshot_every=2, first_epoch=first)
    return experiment


@functools.cache
def bare(run, device="cpu"):
    """What a run without hooks leaves."""
    return left_by(run(None, device=device))


def run_steps(manager, first=0, last=23, experiment=None, device="cpu"):
    experiment = experiment or token_experiment(device)
    hl.step_loop(experiment, steps=last, manager=manager, snapshot_every=4, first_step=first)
    return experiment


LOOPS = pytest.mark.parametrize("run", [run_epochs, run_steps])


# -- inert ---------------------------------------------------------------------------------------------------


@LOOPS
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_run_with_all_observers_is_the_run_without(run, device):
    """Weights, buffers, gradients, optimizer, modes and all random streams, to the last bit; each of them reported."""
    sink = hl.sinks.MemorySink()
    experiment = run(new_manager(OBSERVERS, sink, offload_state=device != "cpu"), device=device)
    assert differences(bare(run, device), left_by(experiment)) == []
    assert {name.partition("/")[0] for name in sink.latest} >= set(OBSERVERS)
    hl.assert_no_hooks(experiment.model)


@pytest.mark.parametrize("name", OBSERVERS)
def test_a_run_with_one_observer_is_the_run_without(name):
    """Each by itself, with every check that a manager has."""
    sink = hl.sinks.MemorySink()
    assert differences(bare(run_epochs), left_by(run_epochs(new_manager([name], sink)))) == []
    assert any(metric.startswith(f"{name}/") for metric in sink.latest)


@LOOPS
def test_an_observer_that_moves_a_weight_would_be_noticed(run):
    """The negative control: a path length that nudges what it measures."""

    class Nudges(type(made("path_length"))):
        def compute(self, ctx):
            with torch.no_grad():
                next(ctx.model.parameters()).mul_(1 + 1e-7)
            return super().compute(ctx)

    assert differences(bare(run), left_by(run(hl.HookManager(hooks=[Nudges()])))) != []


# -- resuming ------------------------------------------------------------------------------------------------


def test_every_observer_goes_on_where_it_was():
    """State saved after two epochs and loaded into new hooks: from then on they say the same, to the last bit."""
    sinks = hl.sinks.MemorySink(), hl.sinks.MemorySink(), hl.sinks.MemorySink()
    run_epochs(new_manager(OBSERVERS, sinks[0]))
    manager = new_manager(OBSERVERS, sinks[1])
    half = run_epochs(manager, last=2)
    later = new_manager(OBSERVERS, sinks[2])
    later.load_state_dict(copied(manager.state_dict()))
    run_epochs(later, first=2, experiment=half)
    whole, first, second = ([dict(record.metrics) for record in sink.records] for sink in sinks)
    assert repr(first + second) == repr(whole)
    assert len(second) > 5
    forgetful, sink = new_manager(OBSERVERS), hl.sinks.MemorySink()
    half, other = run_epochs(forgetful, last=2), new_manager(OBSERVERS, sink)
    other.load_state_dict({**forgetful.state_dict(), "hooks": {}})  # the negative control
    run_epochs(other, first=2, experiment=half)
    assert repr([dict(record.metrics) for record in sink.records]) != repr(second)


def keeps_nothing(name):
    """Say whether the class of the hook has no state: nothing in ``kept``, and no way of its own to save some."""
    cls = CLASSES[name]
    return (
        not cls.kept and cls.state_dict is Analysis.state_dict and cls.get_state_tensors is Analysis.get_state_tensors
    )


@pytest.mark.parametrize("name", OBSERVERS)
def test_state_is_all_that_a_hook_knows(name):
    """Saved in the middle of a stretch of steps, loaded before and after training starts: all say the same."""
    hook, model = made_with_reference(name), token_experiment().model
    hook.start(model)
    show(hook, model, range(7))
    hook.compute(report(hook, model, 7))
    show(hook, model, range(8, 11))
    state = copied(hook.state_dict())
    hook.finish()
    found = []
    for way in ("before", "after", "not at all"):
        again, twin = made_with_reference(name), copy.deepcopy(model)
        if way == "before":
            again.load_state_dict(copied(state))
        again.start(twin)
        if way == "after":
            again.load_state_dict(copied(state))
        show(again, twin, range(11, 13))
        found.append(numbers(again.compute(report(again, twin, 13)) or {}))
        again.finish()
    assert found[0] == found[1] != {}
    if not keeps_nothing(name) and name not in ("fourier", "norms", "training_metrics"):
        # These have nothing to forget here: no frequency; sums of long runs,
        # which test_the_curve_of_a_run_ends_at_its_last_step_and_goes_on_after_a_checkpoint loses.
        assert found[2] != found[0]


@pytest.mark.parametrize("name", OBSERVERS)
def test_reset_forgets_the_run(name):
    """A hook that was reset says what a new one says; it is given the reference of the new run, as a manager does."""
    used, model = made_with_reference(name), token_experiment().model
    used.start(model)
    show(used, model, range(4))
    used.compute(report(used, model, 1))
    used.finish()
    used.reset()
    give_reference(used)
    found = []
    for hook in (used, made_with_reference(name)):
        twin = copy.deepcopy(model)
        hook.start(twin)
        show(hook, twin, range(4, 6))
        found.append(numbers(hook.compute(report(hook, twin, 2)) or {}))
        hook.finish()
    assert found[0] == found[1]


def made_with_reference(name):
    """A hook that has what it may need."""
    hook = made(name, every=2) if name == "stats" else made(name)
    give_reference(hook)
    return hook


def give_reference(hook):
    hook.set_reference_weights({key: value + 1 for key, value in token_experiment().model.state_dict().items()})


def show(hook, model, seeds):
    """Steps of a sort: a forward, a backward, and weights that move."""
    for seed in seeds:
        torch.manual_seed(seed)
        model.zero_grad()
        model(torch.randint(11, (12, 2))).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn_like(parameter)
        if POST_STEP in hook.loop_points["epoch"]:
            hook.compute(context(model, POST_STEP, loss=torch.tensor(float(seed)), lr=0.1))


def report(hook, model, seed):
    """The context of a report."""
    (point,) = set(hook.loop_points["epoch"]) - {POST_STEP}
    return context(model, point, accumulated_grads=random_grads(model, seed), val_acc=0.5, loss=1.0)


def numbers(metrics):
    """Without tensors."""
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()}


# -- what comes in ------------------------------------------------------------------------------------------


def shown_everything(hook, model, grads, **given):
    """Three steps and two reports with the same gradients; the last report."""
    hook.set_reference_weights({name: p.detach() + 1 for name, p in model.named_parameters()})
    found = None
    for _ in range(2):
        for name, parameter in model.named_parameters():
            parameter.grad = grads.get(name)
        for _ in range(3):
            if POST_STEP in hook.loop_points["epoch"]:
                hook.compute(context(model, POST_STEP, loss=given.get("loss", 1.0), lr=0.1))
        (point,) = set(hook.loop_points["epoch"]) - {POST_STEP}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HooklineWarning)
            found = hook.compute(context(model, point, accumulated_grads=grads, **given))
    hook.finish()
    return {} if found is None else numbers(found)


GRADIENT_METRICS = {
    "norms": "total_norm",
    "consecutive": "cos_sim",
    "variance": "signal_to_noise",
    "batch_dynamics": "effective_rank",
    "weight_tracking": "mean_grad_weight_align",
    "training_diagnostics": "grad_norm_mean",
    "gradient_projection": "overall_grad_cossim_to_solution",
    "subspace_gradient_info": "participation_ratio",
    "token_gradient": "gradient_gini",
    "phases": "grad_velocity",
}


@pytest.mark.parametrize("name", OBSERVERS)
def test_nan_in_gradients_is_a_nan_in_metrics_and_no_error(name):
    """What is made of the gradient says so; the rest stays a number."""
    model = token_experiment().model
    grads = random_grads(model, 1)
    grads["embedding.weight"][3, 2] = math.nan
    grads["hidden.weight"][0, 0] = math.inf
    found = shown_everything(made(name), model, grads)
    if name in GRADIENT_METRICS:
        assert not math.isfinite(found[GRADIENT_METRICS[name]])


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("value", [0.0, None], ids=["zero", "none"])
def test_gradients_that_are_zero_or_missing_divide_by_nothing(name, value):
    """No error, and nothing that is not finite."""
    model = token_experiment().model
    grads = {} if value is None else {key: torch.zeros_like(p) for key, p in model.named_parameters()}
    found = shown_everything(made(name), model, grads)
    numbers = [number for number in found.values() if isinstance(number, float)]
    assert all(math.isfinite(number) for number in numbers)


@pytest.mark.parametrize("name", OBSERVERS)
def test_weights_that_are_nan_are_no_error(name):
    """The run has gone wrong; the one who looks at it must not be the second thing that has."""
    model = token_experiment().model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    shown_everything(made(name), model, random_grads(model, 1), loss=math.nan)


class Scalar(nn.Module):
    """One parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.scale


MODELS = {
    "one number": Scalar,
    "one weight": lambda: nn.Linear(1, 1, bias=False),
    "a bias alone": lambda: nn.ParameterDict({"bias": nn.Parameter(torch.ones(3))}),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)),
    "nothing to train": nn.ReLU,
    "not made yet": lambda: nn.LazyLinear(3),
    "half": lambda: nn.Linear(4, 4).bfloat16(),
    "double": lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).double(),
    "complex": lambda: nn.Linear(3, 3, dtype=torch.complex64),
    "frozen": lambda: nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)),
}


@pytest.mark.parametrize("label", MODELS)
def test_every_observer_takes_any_model(label):
    """No error; what there is to tell is told."""
    torch.manual_seed(0)
    told = {}
    for name in OBSERVERS:
        model = MODELS[label]()
        real = {key: p for key, p in model.named_parameters() if not isinstance(p, nn.UninitializedParameter)}
        grads = {key: torch.randn_like(p) for key, p in real.items() if p.requires_grad}
        hook = made(name)
        hook.set_reference_weights({key: p.detach() + 1 for key, p in real.items()})
        told[name] = 0
        for _ in range(2):
            for key, parameter in real.items():
                parameter.grad = grads.get(key)
            for point in sorted(hook.loop_points["epoch"], key=lambda point: point is not POST_STEP):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", HooklineWarning)
                    told[name] = len(hook.compute(context(model, point, accumulated_grads=grads, loss=1.0)) or ())
        hook.finish()
    assert told["training_metrics"] == 2
    if label not in ("nothing to train", "not made yet"):
        assert told["path_length"] == told["parameter_delta"] == 3
        assert bool(told["norms"]) is (label != "a bias alone")


# -- what goes out -------------------------------------------------------------------------------------------


@LOOPS
def test_every_metric_is_described_and_every_hook_says_what_it_is(run):
    """By name, or by a pattern such as ``top_sv/{param}``; with a description, and no hook's name in front."""
    sink, manager = hl.sinks.MemorySink(), new_manager(OBSERVERS)
    run(new_manager(OBSERVERS, sink))
    for name, hook in manager.hooks.items():
        infos = hook.describe_metrics()
        assert hook.description
        assert hook.pure
        assert infos
        assert all(info.description and not info.name.startswith(f"{name}/") for info in infos)
        patterns = [re.sub(r"\\\{\w+\\\}", ".+", re.escape(info.name)) for info in infos]
        mine = [metric for metric in sink.latest if metric.startswith(f"{name}/")]
        emitted = [metric.removeprefix(f"{name}/") for metric in mine]
        undescribed = [metric for metric in emitted if not any(re.fullmatch(pattern, metric) for pattern in patterns)]
        assert emitted and undescribed == [] if name != "stats" else emitted


def test_neither_the_order_of_hooks_nor_offloading_their_state_changes_a_metric():
    """Work is shared, results are not: backwards, all say the same; whatever is moved between firings comes back."""
    one, other = hl.sinks.MemorySink(), hl.sinks.MemorySink()
    run_epochs(new_manager(OBSERVERS, one))
    run_epochs(new_manager(OBSERVERS[::-1], other, offload_state=True))
    assert one.latest == other.latest


def test_all_built_ins_are_known_by_name(own_registry):
    """Observers and the four others; a hook of the user's keeps its name."""

    @own_registry.register("norms")
    class Mine(hl.TrainingHook):
        def compute(self, ctx):
            return {}

    register_built_ins()
    register_built_ins()
    assert set(own_registry.known()) == {*analyses.BUILT_IN, "first_bad_operation", "flight_recorder"}
    assert own_registry.get("norms") is Mine
    assert set(OBSERVERS) <= set(own_registry.list_observers())
    assert own_registry.get("fourier") is analyses.FourierHook
    assert analyses.FourierHook.name == "fourier"
    assert "FourierHook" in dir(analyses)
    with pytest.raises(AttributeError, match="NoSuchHook"):
        analyses.NoSuchHook
