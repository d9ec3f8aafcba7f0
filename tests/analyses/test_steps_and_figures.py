"""What a researcher has to be able to trust: no step waits for a device, and small gradients have angles too."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from helpers_analyses import TokenModel, context, cos, flat, made, random_grads
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hookline as hl
from hookline.analyses import _history, _values, _vectors
from hookline.analyses._history import StepNumbers

POST_STEP, POST_EPOCH = hl.HookPoint.POST_STEP, hl.HookPoint.POST_EPOCH
STEP_LEVEL = ["training_metrics", "batch_dynamics", "path_length", "training_diagnostics", "gradient_noise_scale"]


# -- no step waits -------------------------------------------------------------------------------------------


class Transfers(TorchDispatchMode):
    """Notes what moves between host and device: numbers that are read, and copies from another device.

    The device is ``meta``, which every machine has. A number that is assigned to a place in a tensor counts as well: on
    a GPU it is copied there from the host, and the copy waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._from_host: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = func.__name__.partition(".")[0]
        if name == "_local_scalar_dense":
            self.seen.append(name)
        elif name in ("copy_", "_to_copy", "index_put_", "_index_put_impl_"):
            devices = {tensor.device.type for tensor in given} | {str((kwargs or {}).get("device", "meta"))[:4]}
            if len(devices - {"None"}) > 1 or any(one is other for one in given[1:] for other in self._from_host):
                self.seen.append(name)
        found = func(*args, **(kwargs or {}))
        if name == "scalar_tensor":
            self._from_host.append(found)
        return found


@pytest.fixture
def on_meta(monkeypatch) -> nn.Module:
    """A model on a device that no number can be read from, with gradients there."""
    monkeypatch.setattr(_values, "_is_unknown", lambda parameter: False)  # else they are left out
    model = TokenModel().to("meta")
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    return model


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in STEP_LEVEL), ("training_metrics", {"dense_steps": 4})]
)
def test_nothing_moves_between_host_and_device_at_a_step(on_meta, name, options):
    """Seventy steps, which is past every buffer that fills; a learning rate on the device is not read either."""
    hook, loss = made(name, **options), torch.empty((), device="meta")
    hook.start(on_meta)
    rate: Any = torch.empty((), device="meta") if name == "training_diagnostics" else 0.1
    with Transfers() as transfers:
        for step in range(70):
            hook.compute(context(on_meta, POST_STEP, step=step, loss=loss, lr=rate))
    assert transfers.seen == []


def test_what_waits_would_be_seen():
    """The control: what training_diagnostics did, reading a number, and a move from the host."""
    values = torch.zeros(4, 8, device="meta")
    for act in (
        lambda: values.__setitem__((0, 1), 0.5),
        lambda: values.__setitem__((0, 1), torch.tensor(0.5)),
        lambda: torch.ones(3).to("meta"),
    ):
        with Transfers() as transfers:
            act()
        assert transfers.seen, act
    with Transfers() as transfers, pytest.raises(RuntimeError):
        values[0, 0].item()
    assert transfers.seen == ["_local_scalar_dense"]
    with Transfers() as transfers:
        values[0, 1].fill_(0.5)
        torch.linalg.vector_norm(values)
    assert transfers.seen == []


def test_series_keep_every_kind_of_number_in_order_and_where_it_is():
    """Tensors of two dtypes, floats, functions, and none; a tensor that is written to afterwards is a copy."""
    series, wanted, loss = StepNumbers(), [], torch.zeros(())
    for number in range(200):
        kind = number // 70 + number % 3 if number < 140 else 0
        value: Any = [loss.fill_(number), float(number), lambda number=number: number, None][kind]
        wanted.append(math.nan if value is None else float(number))
        series.add(value if number % 50 else torch.tensor(float(number), dtype=torch.float64))
        wanted[-1] = wanted[-1] if number % 50 else float(number)
    again = StepNumbers()
    again.load(series.state())
    assert [series.has_any, again.has_any] == [True, True]
    assert series.take() == pytest.approx(wanted, nan_ok=True, rel=0, abs=0)
    assert again.take() == pytest.approx(wanted, nan_ok=True, rel=0, abs=0)
    assert (series.has_any, series.take().size, series.state()) == (False, 0, {})


# -- parameters are looked up at each firing -----------------------------------------------------------------


def named_at_step(model: nn.Module, epoch: int = 0) -> dict[str, nn.Parameter]:
    return _values.values_of(hl.RunDataContext(POST_STEP, epoch, model=model)).parameters


def test_a_parameter_that_is_replaced_or_added_between_two_steps_is_noticed():
    """At once."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert named_at_step(model)["0.weight"] is model[0].weight
    kept, model[0].weight = model[0].weight, nn.Parameter(torch.zeros(2, 2))
    assert named_at_step(model)["0.weight"] is model[0].weight is not kept
    model.append(nn.Linear(2, 1))
    assert "2.weight" in named_at_step(model)


def test_looking_parameters_up_keeps_no_model_alive():
    """Nor what is below it."""
    model = nn.Sequential(nn.Linear(2, 2))
    named_at_step(model)
    there = weakref.ref(model), weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert [ref() for ref in there] == [None, None]


# -- angles and quotients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-12])
def test_cosines_do_not_depend_on_how_small_a_gradient_is(scale):
    """Adding 1e-8 to the product of lengths, as OrderedLearning does, makes 0.003 of 0.5 at 1e-5."""
    model = TokenModel()
    hooks = {name: made(name) for name in ("consecutive", "variance", "weight_tracking")}
    grads = [random_grads(model, seed, scale=scale) for seed in (1, 2)]
    for grad in grads:
        found = {name: hook.compute(context(model, accumulated_grads=grad)) for name, hook in hooks.items()}
    wanted = cos(flat(grads[0]), flat(grads[1]))
    assert wanted > 0.3
    assert float(found["consecutive"]["cos_sim"]) == pytest.approx(wanted, rel=1e-5)
    assert found["variance"]["mean_pairwise_cos"] == pytest.approx(wanted, rel=1e-5)
    assert found["variance"]["signal_to_noise"] == pytest.approx(snr(grads), rel=1e-4)
    weight = model.hidden.weight.detach().double().numpy()
    align = cos(grads[1]["hidden.weight"].double().numpy(), weight)
    assert found["weight_tracking"]["grad_weight_align/hidden.weight"] == pytest.approx(align, rel=1e-5)


def snr(grads: list[dict[str, Tensor]]) -> float:
    rows = np.array([flat(grad) for grad in grads])
    return float(np.linalg.norm(rows.mean(0)) / np.linalg.norm(rows.std(0, ddof=1)))


def test_zero_has_no_angle_and_what_does_not_change_no_noise():
    """0 and infinity, and no error; NaN stays NaN."""
    model = nn.Linear(3, 2, bias=False)
    one = torch.ones(2, 3)
    for first, second, cosine, ratio in (
        (0 * one, one, 0.0, None),
        (one, one, 1.0, math.inf),
        (0 * one, 0 * one, 0, 0),
    ):
        consecutive, variance = made("consecutive"), made("variance")
        for grad in (first, second):
            ctx = context(model, accumulated_grads={"weight": grad})
            angle, spread = consecutive.compute(ctx), variance.compute(ctx)
        assert float(angle["cos_sim"]) == pytest.approx(cosine)
        assert spread["mean_pairwise_cos"] == pytest.approx(cosine)
        if ratio is not None:
            assert spread["signal_to_noise"] == ratio


# -- training_metrics, phases --------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [-3.0, 0.0, 1e-9, 2.5, 88.8, 709.78, 709.79, 1e30, math.inf, -math.inf])
def test_perplexity_is_that_of_numpy_whatever_the_loss_is_kept_in(loss):
    """A float, and tensors of four precisions, each to its own rounding of the loss."""
    for given in (
        loss,
        *(torch.tensor(loss, dtype=d) for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)),
    ):
        with np.errstate(over="ignore"):
            wanted = float(np.exp(np.float64(float(given))))
        assert float(made("training_metrics").compute(context(loss=given))["perplexity"]) == pytest.approx(wanted)


def test_a_loss_that_is_no_number_has_a_perplexity_that_is_none():
    found = made("training_metrics").compute(context(loss=math.nan))
    assert math.isnan(found["perplexity"])


@pytest.mark.parametrize(
    ("percent", "code"), [(0, 0), (4.99, 0), (5, 1), (19.9, 1), (20, 2), (80, 3), (98.9, 3), (99, 4)]
)
def test_phases_begin_at_their_bounds(percent, code):
    """The same in percent and as a fraction."""
    point, model = hl.HookPoint.SNAPSHOT, nn.Linear(2, 2)
    for accuracy, scale in ((percent, "percent"), (percent / 100, "fraction"), (torch.tensor(percent / 100), "auto")):
        found = made("phases", accuracy=scale).compute(context(model, point, val_acc=accuracy))
        assert found == {"phase_code": code}


def test_an_embedding_that_was_zero_has_moved_by_no_share():
    """And one that went nowhere by none."""
    hook, model, point = made("phases"), nn.Sequential(nn.Embedding(4, 2)), hl.HookPoint.SNAPSHOT
    nn.init.zeros_(model[0].weight)
    hook.compute(context(model, point))
    nn.init.ones_(model[0].weight)
    found = hook.compute(context(model, point))
    assert [float(found[name]) for name in ("embedding_change", "embedding_change_normalized")] == pytest.approx(
        [8**0.5, 0.0]
    )
    assert float(hook.compute(context(model, point))["embedding_change_normalized"]) == 0.0


# -- memory --------------------------------------------------------------------------------------------------


def test_a_spectrum_that_would_not_fit_is_not_begun():
    """It says so once, with what would help; with more room it does."""
    model = nn.Linear(40, 10)
    model_ctx = hl.ModelDataContext(model, loss_fn=lambda model, x: model(x).square().sum(), batch=torch.ones(2, 40))
    hook = made("hessian_spectrum", iterations=5, max_gib=21 * 410 / 2**30)
    with pytest.warns(hl.HooklineWarning, match="max_gib=.*fewer iterations="):
        hook.intervene(context(model, POST_STEP), model_ctx)
    assert hook.intervene(context(model, POST_STEP), model_ctx) is None  # and no second warning, which is an error here
    roomy = made("hessian_spectrum", iterations=5, max_gib=25 * 410 / 2**30)
    assert roomy.intervene(context(model, POST_STEP), model_ctx)["top_eigenvalue"] > 0


# -- quick ways and slow ones give the same ------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_lengths_of_a_step_are_of_all_parameters_and_gradients(monkeypatch, frozen, small):
    """Zeros stand for what has no gradient; biases count in the length."""
    model = TokenModel()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1)) if number else None
    if frozen:
        next(iter(model.parameters())).requires_grad_(False)
    monkeypatch.setattr(_values, "_SMALL", 1 << 20 if small else 0)
    work = _values.values_of(context(model, POST_STEP))
    found = [float(work.step_gradient_length), float(work.parameters_length)]
    grads = [p.grad.double() for p in model.parameters() if p.grad is not None]
    weights = [p.detach().double() for p in model.parameters()]
    wanted = [float(sum(tensor.square().sum() for tensor in tensors)) ** 0.5 for tensors in (grads, weights)]
    assert found == pytest.approx(wanted, rel=1e-5)
    there = {n: p for n, p in sorted(model.named_parameters()) if "bias" not in n and p.requires_grad}
    flat_gradient = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in there.values()])
    assert torch.equal(work.flat_step_gradient, flat_gradient)


def test_a_step_without_gradients_has_no_length():
    """And if biases alone have one, there is a length and no flat gradient."""
    model = TokenModel()
    work = _values.values_of(context(model, POST_STEP))
    assert (work.step_gradient_length, work.flat_step_gradient) == (None, None)
    name, bias = next((name, p) for name, p in model.named_parameters() if "bias" in name)
    bias.grad = torch.ones_like(bias)
    work = _values.values_of(context(model, POST_STEP))
    assert float(work.step_gradient_length) == pytest.approx(bias.numel() ** 0.5), name
    assert work.flat_step_gradient is None


@pytest.mark.parametrize("given", [[torch.float32], [torch.float32, torch.float64], [torch.bfloat16, torch.float32]])
def test_a_flat_vector_has_memory_of_its_own(given):
    """Of one tensor as of several; half precision is widened."""
    tensors = [torch.ones(2, 3, dtype=dtype, requires_grad=True) for dtype in given]
    found = _vectors.flat_vector_or_none(tensors)
    assert found.dtype == (torch.float64 if torch.float64 in given else torch.float32)
    assert (found.shape, found.requires_grad) == ((6 * len(given),), False)
    found.fill_(7)
    assert all(bool((tensor == 1).all()) for tensor in tensors)
    assert _vectors.flat_vector_or_none([]) is None


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("resumes", [False, True])
def test_windows_keep_their_products_right(monkeypatch, batch, resumes):
    """Past the end of the ring, one vector or several at a time, in a few chunks, and over a checkpoint."""
    monkeypatch.setattr(_history, "_IN_CACHE", 64)
    vectors = torch.randn(23, 300, generator=torch.Generator().manual_seed(0))
    window = _history.GradientWindow(5, batch, exact=True)
    for number, vector in enumerate(vectors):
        window.add(vector)
        if resumes:
            state, window = window.state(), _history.GradientWindow(5, batch, exact=True)
            window.load(state)
        if number % (batch + 1) == 0:
            newest = vectors[max(number - 4, 0) : number + 1].double().flip(0)
            assert window.gram() == pytest.approx((newest @ newest.T).numpy(), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "is_bias"),
    [
        ("head.bias", True),
        ("attention.in_proj_bias", True),
        ("rnn.bias_ih_l0", True),
        ("biases.0", True),
        ("head.parametrizations.bias.original0", True),
        ("head.weight", False),
        ("unbiased_head.weight", False),
        ("bias_net.parametrizations.weight.original", False),
    ],
)
def test_the_last_part_of_a_name_says_whether_it_is_a_bias(name, is_bias):
    """Not the name of a module that it is in."""
    assert _vectors.is_bias(name) is is_bias
