"""``nan_alarm``, ``log_shapes``, ``steer`` and ``record_mean``: what they say, and what they change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_factories import PADDED, Named, Wrapped
from helpers_threads import in_threads
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import hookline as hl
from hookline.factories import log_shapes, nan_alarm, record_mean, serving, steer
from hookline.tree import main_tensor


def bad(*, nan: int = 0, inf: int = 0, shape: tuple[int, ...] = (3, 4)) -> Tensor:
    tensor = torch.zeros(shape)
    tensor.view(-1)[:nan] = torch.nan
    tensor.view(-1)[nan : nan + inf] = -torch.inf
    return tensor


# -- nan_alarm -----------------------------------------------------------------------------------------------


def test_the_alarm_says_once_which_module_was_first(caplog: pytest.LogCaptureFixture) -> None:
    """One line per module, with counts, shape and the call; clean modules have none."""
    hook = nan_alarm({})
    clean, broken = nn.Identity(), nn.ReLU()
    for value in (bad(), bad(nan=2, inf=1), bad(nan=5)):
        hook(clean, (), bad())
        hook(broken, (), (value, None))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["ReLU.0 gave out 2 NaN and 1 infinities, in a tensor of shape (3, 4), in call 2"]
    assert hook.to_metrics() == {
        "Identity.0/nonfinite": 0.0, "Identity.0/nan": 0.0, "Identity.0/inf": 0.0,
        "ReLU.0/nonfinite": 2.0, "ReLU.0/nan": 7.0, "ReLU.0/inf": 1.0,
    }  # fmt: skip


def test_the_alarm_names_the_first_module_first(caplog: pytest.LogCaptureFixture) -> None:
    """In a chain, the line of the module that began it comes before those it spread to."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with hl.attach(model, "#", nan_alarm()), torch.inference_mode():
        model(torch.ones(1, 2))
    assert [record.getMessage().split()[0] for record in caplog.records] == ["0", "1", "2"]


def test_the_alarm_can_stop_the_forward() -> None:
    """action="raise" raises out of the call, as an error of ours and as a FloatingPointError."""
    module = nn.Identity()
    module.register_forward_hook(nan_alarm({"action": "raise"}))
    module(bad())
    with pytest.raises(hl.errors.NonFiniteError, match=r"Identity\.0 gave out 1 NaN and 0 infinities") as caught:
        module(bad(nan=1))
    assert isinstance(caught.value, FloatingPointError)


def test_the_alarm_leaves_padding_alone(caplog: pytest.LogCaptureFixture) -> None:
    """NaN where a batch is padded alarms nobody; one in a real token does."""
    hook, module, x = nan_alarm(), nn.Identity(), torch.zeros(2, 3, 4)
    x[1, :2] = torch.nan
    with serving(PADDED):
        hook(module, (), x)
        assert not caplog.records
        x[1, 2, 0] = torch.nan
        hook(module, (), x)
    assert len(caplog.records) == 1


def test_the_alarm_takes_anything() -> None:
    """Whole numbers, nothing, empty tensors; with every=2 the second call is not looked at."""
    hook, module = nan_alarm({"every": 2}), nn.Identity()
    for output in (torch.ones(2, dtype=torch.int64), bad(nan=1), torch.empty(0), None, None):
        hook(module, (), output)
    assert hook.to_metrics()["Identity.0/nonfinite"] == 0.0


# -- log_shapes ----------------------------------------------------------------------------------------------


def test_shapes_are_logged_once_for_each_set(caplog: pytest.LogCaptureFixture) -> None:
    """A line for a new shape, dtype or structure of a module; none for a call."""
    hook, module = log_shapes({}), nn.Identity()
    with caplog.at_level("INFO", "hookline.factories"):
        for _ in range(3):
            hook(module, (), torch.ones(2, 3))
            hook(module, (), (torch.ones(2, 3), torch.ones(1, dtype=torch.bfloat16), "x"))
            hook(module, (), None)
    assert caplog.messages == [
        "Identity.0: output (2, 3) float32 cpu",
        "Identity.0: output.0 (2, 3) float32 cpu, output.1 (1,) bfloat16 cpu",
        "Identity.0: no tensors",
    ]
    assert hook.to_metrics() == {"Identity.0/shapes": 3.0}


def test_shapes_that_never_repeat_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """After ``most`` lines a module has one that says so, and no more; another module has its own."""
    hook, modules = log_shapes({"most": 3, "level": "warning"}), (nn.Identity(), nn.ReLU())
    for length in range(100):
        hook(modules[0], (), torch.ones(length))
    hook(modules[1], (), torch.ones(1))
    assert len(caplog.messages) == 5
    assert caplog.messages[3] == "Identity.0: more than 3 sets of shapes; no further ones are logged"


def test_inputs_are_told_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """inputs=True puts the positional ones in front."""
    module = nn.Linear(3, 2)
    module.register_forward_hook(log_shapes({"inputs": True, "level": "warning"}))
    module(torch.ones(4, 3))
    assert caplog.messages == ["Linear.0: input.0 (4, 3) float32 cpu, output (4, 2) float32 cpu"]


# -- steer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["tensor", "tuple", "dict", "dataclass", "list"])
def test_the_vector_is_added_inside_any_structure(make: str) -> None:
    """The main tensor is changed, everything beside it stays, and the type of the output is the same."""
    module, x = Wrapped(make), torch.randn(2, 3, 4)
    plain = module(x)
    with hl.attach(module, steer({"vector": [1.0, 0.0, 0.0, -1.0], "strength": 2.0})):
        steered = module(x)
    assert type(steered) is type(plain)
    assert torch.equal(main_tensor(steered), main_tensor(plain) + torch.tensor([2.0, 0.0, 0.0, -2.0]))
    if isinstance(steered, Named):
        assert steered.extras == {"k": 1}
        assert steered.loss == 0
    assert torch.equal(main_tensor(module(x)), main_tensor(plain))  # off again


def test_the_vector_takes_dtype_and_mode_of_the_output() -> None:
    """bfloat16 stays bfloat16; the hook of an inference mode serves in training, and gradients flow through it."""
    hook, module = steer({"vector": [1.0] * 4}), nn.Identity()
    module.register_forward_hook(hook)
    with torch.inference_mode():
        assert module(torch.zeros(2, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16
    x = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    module(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_last_steers_the_last_token_of_each_row() -> None:
    """Of (batch, sequence, units) the last column; of (batch, units) all rows."""
    hook, module = steer({"vector": [1.0, 1.0], "positions": "last"}), nn.Identity()
    module.register_forward_hook(hook)
    out = module(torch.zeros(2, 3, 2))
    assert out[:, -1].eq(1).all()
    assert out[:, :-1].eq(0).all()
    assert module(torch.zeros(2, 2)).eq(1).all()


def test_a_vector_of_another_width_is_an_error_that_says_both() -> None:
    """A single number would broadcast, and is refused as well."""
    for width in (3, 1):
        module = nn.Linear(4, 4)
        module.register_forward_hook(steer({"vector": [1.0] * width}))
        with pytest.raises(
            hl.errors.HookReturnError, match=rf"vector of shape \({width},\), but the output of 'Linear'.*4\)"
        ):
            module(torch.ones(2, 4))


def test_whole_numbers_are_not_steered() -> None:
    """Token ids have no direction to be pushed in."""
    module = nn.Identity()
    module.register_forward_hook(steer({"vector": [1.0, 1.0]}))
    with pytest.raises(hl.errors.HookReturnError, match="real numbers"):
        module(torch.ones(2, 2, dtype=torch.int64))


def test_an_edit_that_observe_would_ignore_is_refused() -> None:
    """From code and from a spec; nothing is attached."""
    model = nn.Sequential(nn.Identity())
    spec = {"target_modules": ["0"], "hook_factory": "hookline.factories:steer", "config": {"vector": [1.0, 1.0]}}
    with pytest.raises(
        hl.errors.OptionError, match=r"steer edits values, and observe=True ignores .* Leave observe out"
    ):
        hl.attach(model, "0", steer({"vector": [1.0, 1.0]}), observe=True)
    with pytest.raises(hl.errors.OptionError, match="steer edits values"):
        hl.register_hooks(model, [spec | {"observe": True, "every": 2}])
    assert not model[0]._forward_hooks
    with hl.register_hooks(model, [spec | {"observe": False}]):
        assert model(torch.zeros(1, 2)).eq(1).all()


# -- record_mean ---------------------------------------------------------------------------------------------


def test_means_are_over_all_tokens_of_each_module(tmp_path: Path) -> None:
    """Several batches of different sizes; saved by close(), and read back by steer."""
    torch.manual_seed(0)
    file = tmp_path / "deep" / "means.safetensors"
    model, hook = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), record_mean({"file": str(file)})
    seen: list[Tensor] = []
    with hl.attach(model, "#", hook), torch.inference_mode():
        for batch in (1, 5, 2):
            x = torch.randn(batch, 6, 4)
            model(x)
            seen.append(model[0].forward(x).flatten(0, 1))
    want = torch.cat(seen).double().mean(0)
    means = hook.means()
    assert torch.allclose(means["0"].double(), want, atol=1e-6)
    assert torch.allclose(means["1"].double(), torch.cat(seen).relu().double().mean(0), atol=1e-6)
    assert hook.tokens() == {"0": 48, "1": 48}
    assert hook.to_metrics()["0/norm"] == pytest.approx(want.norm().item(), rel=1e-5)
    hook.close()
    hook.close()
    with safe_open(str(file), "pt") as saved:
        assert saved.metadata() == {"tokens/0": "48", "tokens/1": "48"}
        assert torch.equal(saved.get_tensor("0"), means["0"])
    steered = steer({"file": str(file), "key": "0", "strength": -1.0})
    out = steered(nn.Identity(), (), means["0"].expand(2, 3))
    assert torch.allclose(out, torch.zeros(2, 3))
    assert [path.name for path in file.parent.iterdir()] == ["means.safetensors"]


def test_tokens_are_those_of_the_mean(tmp_path) -> None:
    """Of outputs of two widths, the mean is that of the one with most tokens, and so is the number of tokens."""
    model = nn.Sequential(nn.Identity())
    hook = record_mean({"file": str(tmp_path / "means.safetensors")})
    with hl.attach(model, "0", hook):
        model(torch.zeros(2, 4))
        model(torch.ones(3, 6))
    assert hook.means()["0"].tolist() == [1.0] * 6
    assert hook.tokens() == {"0": 3}
    with safe_open(hook.save(), framework="pt") as file:
        assert file.metadata() == {"tokens/0": "3"}


@pytest.mark.parametrize(("shape", "units"), [((5,), 5), ((2, 5), 5), ((2, 3, 5), 5), ((2, 5, 3, 3), 5),
                                              ((2, 5, 3, 3, 3), 5), ((2, 5, 3, 3, 3, 3), 5)])  # fmt: skip
def test_units_are_the_same_dimension_for_means_ablations_and_dead_units(shape, units) -> None:
    model, x = nn.Identity(), torch.randn(shape)
    hook = record_mean({})
    with hl.attach(model, "", hook), hl.capture(model, "") as cache, hl.watch(model, "", stats="dead_fraction") as seen:
        model(x)
    (mean,) = hook.means().values()
    assert mean.shape == (units,)
    with hl.patch(model, {"": hl.edits.mean_ablate(cache)}):
        ablated = model(torch.zeros(shape))
    wanted = mean if len(shape) < 4 else mean.reshape(units, *[1] * (len(shape) - 2))
    assert torch.allclose(ablated, wanted.expand(shape))
    assert seen.to_metrics()["forward/dead_fraction"] == 0.0


def test_means_serve_an_ablation() -> None:
    """hookline.edits.mean_ablate takes what means() gives."""
    model, hook, x = nn.Sequential(nn.Linear(4, 3), nn.Identity()), record_mean(), torch.randn(5, 4)
    with hl.attach(model, "0", hook):
        model(x)
    with hl.patch(model, {"0": hl.edits.mean_ablate(hook.means())}):
        assert torch.allclose(model(x), hook.means()["0"].expand(5, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_means_of_half_precision_and_whole_numbers_are_exact(dtype: torch.dtype) -> None:
    """A thousand tokens of 3 have the mean 3, where a sum in half precision would have stopped at 2048."""
    hook = record_mean()
    for _ in range(10):
        hook(nn.Identity(), (), torch.full((1000, 2), 3).to(dtype))
    assert all(mean.tolist() == [3.0, 3.0] for mean in hook.means().values())


def test_means_of_images_are_by_channel_and_padding_is_left_out() -> None:
    """Four dimensions: the second is that of the units. Of a padded batch, real tokens alone."""
    hook = record_mean()
    hook(nn.Identity(), (), torch.arange(3.0).view(1, 3, 1, 1).expand(2, 3, 4, 4))
    assert hook.means()["Identity.0"].tolist() == [0.0, 1.0, 2.0]
    hook, x = record_mean(), torch.ones(2, 3, 4)
    x[1, :2] = 100.0
    with serving(PADDED):
        hook(nn.Identity(), (), x)
    assert hook.means()["Identity.0"].tolist() == [1.0] * 4


def test_means_take_anything_and_need_a_file_to_be_saved() -> None:
    """Empty tensors and no tensors count nothing; save() without a path says so."""
    hook = record_mean()
    outputs: list[Any] = [None, torch.empty(0, 3), torch.tensor(1.0), torch.ones(2, dtype=torch.complex64), "x"]
    for output in outputs:
        hook(nn.Identity(), (), output)
    assert hook.means() == {}
    with pytest.raises(hl.errors.OptionError, match="has no file to write to"):
        hook.save()


def test_two_threads_add_to_one_mean() -> None:
    """Nothing is lost between them."""
    hook, module = record_mean(), nn.Identity()
    in_threads(lambda _: [hook(module, (), torch.ones(4, 2)) for _ in range(300)])
    assert hook.tokens() == {"Identity.0": 2400}
    assert hook.means()["Identity.0"].tolist() == [1.0, 1.0]


def test_a_saved_file_is_replaced_whole(tmp_path: Path) -> None:
    """save() writes beside the file and renames; what was there before is there until then."""
    file = tmp_path / "means.safetensors"
    save_file({"old": torch.zeros(1)}, file)
    hook = record_mean({"file": str(file)})
    hook(nn.Identity(), (), torch.ones(2, 3))
    assert hook.save() == file
    with safe_open(str(file), "pt") as saved:
        assert list(saved.keys()) == ["Identity.0"]
