"""A watch that comes off, of models and tensors that are odd, with options that make no sense."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from helpers_modules import Returns
from helpers_stats import batch, make_model, of, train
from torch import Tensor, nn

import hookline as hl
from hookline.factories import activation_stats

# -- coming off, being told ----------------------------------------------------------------------------------


def test_a_watch_comes_off_without_a_trace_and_keeps_its_numbers():
    """Twice is no harm; an error in the block takes it off too."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = hl.watch(model, optimizer=optimizer)
    train(model, optimizer, 1)
    with pytest.raises(ZeroDivisionError), watch:
        1 / 0
    watch.remove()
    hl.assert_no_hooks(model)
    assert not optimizer._optimizer_step_pre_hooks
    assert of(watch.to_metrics(), "0/forward")["mean"]
    train(model, optimizer, 1)
    assert watch.report()["fired"]["0/forward"] == 1


def test_a_watch_that_saw_nothing_says_so_when_it_comes_off():
    """The model ran, its one watched module did not."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Idle()
    watch = hl.watch(model, "idle", on="forward")
    model(torch.ones(1, 2))
    with pytest.warns(hl.errors.HookNeverFired, match="'idle'"):
        watch.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hl.watch(model, "*", on="forward") as watch:
            model(torch.ones(1, 2))
    assert watch.report()["silent"] == {"idle/forward": "nothing came by"}


def test_an_output_without_a_tensor_is_a_warning_and_no_error():
    model = Returns(lambda x: None, 6, 4)
    with hl.watch(model, None, on="forward") as watch:
        with pytest.warns(hl.HooklineWarning, match=r"no tensor in its output, a NoneType.*exclude="):
            model(batch())
        model(batch())
    assert watch.to_metrics() == {}


def test_a_tensor_that_cannot_be_read_does_not_cost_the_run():
    """A subclass that refuses everything: one warning, and the forward goes on."""

    class Stubborn(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (Tensor.amin, Tensor.detach):
                raise RuntimeError("not for you")
            return super().__torch_function__(func, types, args, kwargs or {})

    model = Returns(lambda x: x.as_subclass(Stubborn), 6, 4)
    with hl.watch(model, None, on="forward") as watch:
        with pytest.warns(hl.HooklineWarning, match=r"could not be taken: RuntimeError: not for you.*exclude="):
            model(batch())
        model(batch())
    assert "not for you" in watch.report()["silent"]["forward"]


def test_transforms_of_torch_func_go_unwatched_and_undisturbed():
    """Their tensors have no numbers of their own."""
    model = make_model()
    with hl.watch(model, "#", on=("forward", "backward")) as watch:
        rows = torch.vmap(model)(batch())
        jacobian = torch.func.jacrev(model)(batch()[0])
        assert watch.to_metrics() == {}
        assert "has no numbers to look at" in watch.report()["silent"]["0/forward"]
        plain = model(batch())
    assert torch.allclose(rows, plain)
    assert jacobian.shape == (3, 6)
    assert "0/forward" not in watch.report()["silent"]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"on": "forwards"}, hl.errors.OptionError, "unknown kind 'forwards'; did you mean 'forward'"),
        ({"on": ()}, hl.errors.OptionError, "no kind"),
        ({"stats": ["median"]}, hl.errors.OptionError, "Unknown statistic 'median'"),
        ({"every": 0}, hl.errors.OptionError, "every="),
        ({"during": "test"}, hl.errors.OptionError, "during="),
        ({"target": "layers.#"}, hl.errors.NoMatchError, "nearest"),
        ({"target": "0.wait", "on": "param"}, hl.errors.NoMatchError, "0.weight"),
        ({"optimizer": "adam"}, TypeError, "optimizer"),
        ({"optimizer": []}, hl.errors.OptionError, "optimizer= is an empty list"),
        ({"scaler": 1024.0}, hl.errors.OptionError, r"scaler= takes a torch.amp.GradScaler, got a float"),
    ],
)
def test_bad_input_is_an_error_and_leaves_nothing_behind(options: dict[str, Any], error: type[Exception], text: str):
    """Before anything is attached, or after everything is off again."""
    model = make_model()
    with pytest.raises(error, match=text):
        hl.watch(model, options.pop("target", "*"), **options)
    hl.assert_no_hooks(model)


def test_a_model_without_parameters_is_watched_all_the_same():
    """Nothing to say of them is no error, unless nothing else was asked for."""
    model = nn.Tanh()
    with hl.watch(model, None) as watch:
        model(torch.ones(2))
    assert watch.report()["fired"] == {"forward": 1, "backward": 0}
    with pytest.raises(hl.errors.NoMatchError):
        hl.watch(nn.Tanh(), None, on="param")


@pytest.mark.parametrize(("stats", "always"), [(("max",), False), (("max", "finite_max"), True)])
def test_extremes_of_finite_numbers_are_in_reports_with_nan_or_in_all_if_asked_for(stats, always):
    model, found = nn.Identity(), []
    with hl.watch(model, on="forward", stats=stats) as watch:
        for other in (1.0, math.nan, 1.0):
            model(torch.tensor([2.0, other]))
            found.append(watch.to_metrics(reset=True).get("forward/finite_max"))
    assert found == ([2.0, 2.0, 2.0] if always else [None, 2.0, None])


def test_it_prints_as_a_table():
    """One line per place, one column per statistic; then what is not shown, and whether the hooks are on."""
    model = make_model()
    with hl.watch(model, "#", on=("forward", "backward"), stats=("mean", "zero_fraction")) as watch:
        assert str(watch) == "nothing watched yet"
        model(batch())
        head, *lines = str(watch).splitlines()
        assert repr(watch).startswith(f"{watch}\nhooks: on")
    assert head.split() == ["mean", "zero_fraction"]
    assert [line.split()[0] for line in lines[:3]] == ["0/forward", "1/forward", "2/forward"]
    assert "3 not shown" in lines[3]
    assert len(watch.report()["silent"]) == 3
    watch.to_metrics(reset=True)
    assert str(watch).startswith("nothing since the last report or reset")


def test_a_copied_model_carries_no_watch():
    """Nor does a pickled one; a watch it keeps is one that saw nothing."""
    model = make_model()
    model.watch = hl.watch(model, "#")
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    for other in (twin, again):
        other(batch())
        hl.assert_no_hooks(other)
        assert other.watch.to_metrics() == {}
    model.watch.remove(quiet=True)


# -- odd models and threads ----------------------------------------------------------------------------------


def test_thresholds_may_be_written_in_any_way():
    """6 and 6.0 are one, and long ones are told apart."""
    model = nn.Identity()
    stats = ["over:6.0", "over:6", "over:1e-7", "over:0.1234567", "over:0.1234568"]
    with hl.watch(model, None, on="forward", stats=stats) as watch:
        model(torch.tensor([0.12345675, 7.0]))
    assert watch.to_metrics() == {
        "forward/over:6": 0.5,
        "forward/over:1e-07": 1.0,
        "forward/over:0.1234567": 1.0,
        "forward/over:0.1234568": 0.5,
    }


def test_a_gradient_that_repeats_itself_is_not_written_out():
    """The gradient of a sum is one number, however many it stands for."""
    model = nn.Identity()
    x = torch.ones(1, 1).expand(1 << 20, 1 << 20)  # 4 TiB, if it were
    with hl.watch(model, None, on="forward", stats=("mean", "norm", "max", "over:0.5")) as watch:
        model(x)
    assert watch.to_metrics() == {
        "forward/mean": 1.0,
        "forward/norm": float(1 << 20),
        "forward/max": 1.0,
        "forward/over:0.5": 1.0,
    }


def test_first_forwards_in_many_threads_lose_nothing():
    """Rows are handed out once, whoever comes first."""
    from concurrent.futures import ThreadPoolExecutor

    for _ in range(30):
        model = nn.Sequential(*(nn.Identity() for _ in range(8)))
        with hl.watch(model, "#", on="forward") as watch, ThreadPoolExecutor(8) as pool:
            shown = list(pool.map(model, map(batch, range(8))))
        assert watch.report()["fired"] == {f"{index}/forward": 8 for index in range(8)}
        means = [value for name, value in watch.to_metrics().items() if name.endswith("/mean")]
        assert means == pytest.approx([torch.cat(shown).mean().item()] * 8, rel=1e-4)


def test_copies_of_a_watched_module_go_unwatched():
    """As DataParallel makes them: they carry the hooks of the original."""
    model = make_model()
    with hl.watch(model, "#", on=("forward", "backward")) as watch:
        twin = model[0]._replicate_for_data_parallel()
        twin.weight, twin.bias = model[0].weight, model[0].bias
        twin(batch()).sum().backward()
        model(batch()).sum().backward()
    assert watch.report()["fired"]["0/forward"] == 1


def test_a_scripted_part_is_no_obstacle():
    """Its parameters are read, its insides are left alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(torch.jit.script(nn.Linear(6, 6)), nn.Linear(6, 2))
        watch = hl.watch(model)
    model(batch()).sum().backward()
    assert {"0.weight/param/mean", "0.weight/param_grad/mean", "1/forward/mean"} <= watch.to_metrics().keys()
    watch.remove()


def test_a_parameter_that_cannot_be_read_does_not_cost_the_step():
    class Grad(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.detach:
                raise RuntimeError("not for you")
            return super().__torch_function__(func, types, args, kwargs or {})

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model, "0.weight", on="param_grad", optimizer=optimizer):
        model[0].weight.grad = torch.ones(8, 6).as_subclass(Grad)
        with pytest.warns(hl.HooklineWarning, match="not for you"):
            optimizer.step()


def test_a_glob_that_only_parameters_answer_to_watches_those():
    """With no word about kinds; asked for modules, it is an error."""
    model = make_model()
    with hl.watch(model, "*.weight") as watch:
        model(batch()).sum().backward()
    assert watch.report()["fired"].keys() == {
        f"{name}.weight/{kind}" for name in "02" for kind in ("param", "param_grad")
    }
    with pytest.raises(hl.errors.NoMatchError):
        hl.watch(model, "*.weight", on="forward")


def test_lazy_and_frozen_parameters_are_read_once_they_are_there():
    """What they are is looked at when they are read."""
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    model[1].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with hl.watch(model, "#", on=("forward", "param_grad")) as watch:
            model(batch()).sum().backward()
            model[1].requires_grad_(True)
            model(batch()).sum().backward()
    fired = watch.report()["fired"]
    assert (fired["0.weight/param_grad"], fired["1.weight/param_grad"]) == (1, 1)


def test_what_is_kept_per_unit_is_kept_of_parameters_and_own_values_too():
    """And scaled gradients are told as they would be without a scaler."""
    model = nn.Linear(4, 2, bias=False)
    nn.init.ones_(model.weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hl.watch(model, None, stats=["histogram"], scaler=scaler, optimizer=optimizer) as watch:
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        watch.update("mine", torch.tensor([4.0]))
        metrics = watch.to_metrics()
    assert metrics == {
        "forward/histogram": {"2": 2},
        "backward/histogram": {"0": 2},
        "weight/param/histogram": {"0": 8},
        "weight/param_grad/histogram": {"0": 8},
        "mine/histogram": {"2": 1},
    }


def test_memory_is_flat_over_many_steps():
    """Six hundred steps of all four kinds: nothing is kept of a step."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hl.watch(model, optimizer=optimizer) as watch:
        train(model, optimizer, 100)
        gc.collect()
        before = len(gc.get_objects())
        train(model, optimizer, 600)
        gc.collect()
        assert len(gc.get_objects()) - before < 30
        assert watch.steps == 700


def test_histograms_alone_are_told_to_be_in_the_metrics():
    with hl.watch(nn.Linear(2, 2), on="param", stats="histogram") as watch:
        assert "to_metrics()" in str(watch)


def test_a_value_and_a_module_called_budget_are_in_tables():
    """Beside what the watch says of its own budget, which is none of its places."""
    model = nn.Sequential(OrderedDict(budget=nn.Linear(6, 4)))
    hook = activation_stats({})
    with hl.attach(model, "budget", hook), hl.watch(model, "budget", on="forward", budget=0.5) as watch:
        watch.update("budget", torch.ones(3))
        model(batch())
        assert watch.to_metrics()["budget/asked"] == 0.5
    rows = [line.split()[0] for line in str(watch).splitlines() if line]
    assert "budget" in rows
    assert "budget/forward" in rows
    assert ">budget<" in hook._repr_html_()
