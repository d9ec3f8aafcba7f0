"""What a researcher has to trust: no step waits for a device, no figure is wrong by rounding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers_analyses import GPU, TokenModel, context, cos, flat, made, random_grads, singular_values, token_experiment
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hookline as hl
from hookline.analyses import (
    AttentionHook,
    ConsecutiveHook,
    HessianHook,
    SubspaceGradientInfoHook,
    VarianceHook,
    _values,
)

POST_STEP, POST_EPOCH = hl.HookPoint.POST_STEP, hl.HookPoint.POST_EPOCH
STEP_LEVEL = ["training_metrics", "batch_dynamics", "path_length", "training_diagnostics"]


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


@pytest.mark.parametrize("name", STEP_LEVEL)
def test_nothing_moves_between_host_and_device_at_a_step(on_meta, name):
    """Seventy steps, which is past every buffer that fills; a learning rate on the device is not read either."""
    hook, loss = made(name), torch.empty((), device="meta")
    hook.start(on_meta)
    rate: Any = torch.empty((), device="meta") if name == "training_diagnostics" else 0.1
    with Transfers() as transfers:
        for step in range(70):
            hook.compute(context(on_meta, POST_STEP, step=step, loss=loss, lr=rate))
    assert transfers.seen == []


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # of torch, once, that it does not see all
@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("name", STEP_LEVEL)
def test_no_step_waits_for_the_device(device, name):
    """By torch's own count; a report waits, which is the negative control."""
    model = token_experiment(device).model
    for key, grad in random_grads(model, 1).items():
        dict(model.named_parameters())[key].grad = grad.to(device)
    hook = made(name)
    hook.start(model)
    ctx = [context(model, POST_STEP, loss=torch.tensor(1.0, device=device), lr=0.1) for _ in range(70)]
    hook.compute(ctx[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for each in ctx[1:]:
            hook.compute(each)
        if name in ("batch_dynamics", "training_diagnostics"):
            with pytest.raises(RuntimeError, match="synchroniz"):
                hook.compute(context(model, POST_EPOCH))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def named_at_step(model: nn.Module, epoch: int = 0) -> dict[str, nn.Parameter]:
    return _values.values_of(hl.RunDataContext(POST_STEP, epoch, model=model)).parameters


def test_a_parameter_that_is_replaced_or_added_between_two_steps_is_noticed():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert named_at_step(model)["0.weight"] is model[0].weight
    kept, model[0].weight = model[0].weight, nn.Parameter(torch.zeros(2, 2))
    assert named_at_step(model)["0.weight"] is model[0].weight is not kept
    model.append(nn.Linear(2, 1))
    assert "2.weight" in named_at_step(model)


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


# -- quick ways and slow ones give the same ------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("resumes", [False, True])
def test_windows_keep_their_products_right(monkeypatch, batch, resumes):
    """Past the end of the ring, one vector or several at a time, in a few chunks, and over a checkpoint."""
    monkeypatch.setattr(_values, "_IN_CACHE", 64)
    vectors = torch.randn(23, 300, generator=torch.Generator().manual_seed(0))
    window = _values.GradientWindow(5, batch, exact=True)
    for number, vector in enumerate(vectors):
        window.add(vector)
        if resumes:
            state, window = window.state(), _values.GradientWindow(5, batch, exact=True)
            window.load(state)
        if number % (batch + 1) == 0:
            newest = vectors[max(number - 4, 0) : number + 1].double().flip(0)
            assert window.gram() == pytest.approx((newest @ newest.T).numpy(), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("share", [1e-3, 1e-4])
def test_gradients_that_hardly_differ_are_told_apart(share):
    """Centred figures are differences of products: in float32, the variance was 10 % off at 1e-3, nonsense below."""
    draw = torch.Generator().manual_seed(0)
    common = torch.randn(40, 50, generator=draw)
    model = nn.Linear(50, 40, bias=False)
    hooks = VarianceHook(), SubspaceGradientInfoHook(), ConsecutiveHook()
    reference = model.weight.detach() + torch.randn(40, 50, generator=draw)
    hooks[1].set_reference_weights({"weight": reference})
    rows = []
    for _ in range(5):
        gradient = common + share * torch.randn(40, 50, generator=draw)
        rows.append(gradient.double().numpy().ravel())
        found = [hook.compute(context(model, accumulated_grads={"weight": gradient})) for hook in hooks]
    gradients = np.array(rows)
    centred = gradients - gradients.mean(0)
    assert found[0]["gradient_variance"] == pytest.approx((centred**2).mean(), rel=1e-4)
    std = np.linalg.norm(gradients.std(0, ddof=1))
    assert found[0]["signal_to_noise"] == pytest.approx(np.linalg.norm(gradients.mean(0)) / std, rel=1e-4)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    squares = sizes**2
    assert found[1]["svd_total_variance"] == pytest.approx(squares.sum(), rel=1e-4)
    assert found[1]["participation_ratio"] == pytest.approx(squares.sum() ** 2 / (squares**2).sum(), rel=1e-3)
    way = (reference - model.weight.detach()).double().numpy().ravel()
    energies = squares * (directions @ (way / np.linalg.norm(way))) ** 2
    share_of_way = found[1]["grad_energy_fraction_toward_solution"]
    assert share_of_way == pytest.approx(energies.sum() / squares.sum(), rel=1e-2)
    one, other = gradients[-1], gradients[-2]
    cosine = one @ other / (np.linalg.norm(one) * np.linalg.norm(other))
    assert float(found[2]["angle_degrees"]) == pytest.approx(math.degrees(math.acos(cosine)), rel=1e-4)


def test_the_largest_singular_values_of_a_large_matrix():
    """As flat as a spectrum gets: to 2 %, and never too large."""
    matrix = torch.rand(900, 600, generator=torch.Generator().manual_seed(0)) - 0.5
    right = np.linalg.svd(matrix.double().numpy(), compute_uv=False)[:20]
    found = singular_values(matrix)
    assert found.shape == (20,)
    assert np.abs(found / right - 1).max() < 0.02
    assert (found <= right * (1 + 1e-5)).all()


class Conv1D(nn.Module):
    """The linear layer of Hugging Face's GPT-2: the weight is (inputs, outputs)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))


class Decoder(nn.Module):
    """Embedding, attention and an MLP as GPT-2 names them; the decoder is the embedding."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(23, 8)
        self.attn = nn.ModuleDict({"c_attn": Conv1D(24, 8), "c_proj": Conv1D(8, 8)})
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(32, 8), "c_proj": Conv1D(8, 32)})
        self.lm_head = nn.Linear(8, 23, bias=False)
        self.lm_head.weight = self.wte.weight


def test_attention_of_gpt2_is_found():
    """Query, key and value lie side by side in c_attn."""
    torch.manual_seed(0)
    model = Decoder()
    found = AttentionHook().compute(context(model))
    thirds = np.split(model.attn["c_attn"].weight.detach().double().numpy(), 3, axis=1)
    spectra = [np.linalg.svd(third, compute_uv=False) for third in thirds]
    assert found["sv_concentration"] == pytest.approx(np.mean([s[0] / s.sum() for s in spectra]), rel=1e-5)


def test_hessian_of_half_precision_is_not_rounded_away():
    """A move of 1e-4 is nothing to a bfloat16 of 1: the difference was zero, whatever the curvature."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).bfloat16()
    data = [torch.randn(8, 4).bfloat16() for _ in range(6)]
    sink = hl.sinks.MemorySink()
    hook = HessianHook(every_n_steps=2, burst_length=2)
    experiment = hl.Experiment(
        model, torch.optim.SGD(model.parameters(), lr=0.01), data, lambda model, x: model(x).float().square().mean()
    )
    hl.epoch_loop(experiment, epochs=1, manager=hl.HookManager(hooks=[hook], sinks=[sink]))
    quotients = list(sink.latest["hessian/rayleigh_quotient"])
    assert quotients
    x = torch.stack(data).double()
    largest = max(float(torch.linalg.eigvalsh(2 * b.T @ b / 8)[-1]) for b in x)
    assert all(0 < quotient < 1.05 * largest for quotient in quotients)
