"""The same promises on a GPU, where the backward runs in another thread; skipped where there is none."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import hookline as hl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


class Attention(nn.Module):
    """Post-norm attention: ``x`` is used three times inside ``mix`` and once more in the residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = Mix(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.mix(x))


class Mix(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop((self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1)) @ self.v(x)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(8), nn.ReLU(inplace=True), Attention(32), Attention(32), nn.Linear(32, 4)
    ).cuda()


def _train(model: nn.Module, steps: int = 20) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        x, y = torch.randn(6, 8, 16, device="cuda"), torch.randn(6, 8, 4, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {**{k: v.clone() for k, v in model.state_dict().items()}, "rng": torch.cuda.get_rng_state()}


def test_watching_every_module_changes_no_bit_of_a_gpu_run() -> None:
    """Weights, buffers and the device's random stream are the same with observers of all kinds on all modules."""
    plain = _train(_model())
    model = _model()
    seen: list[str] = []

    def two(module, grads, *, site):
        seen.append(site.name)

    def three(module, a, b, *, site):
        seen.append(site.name)

    with (
        hl.attach(model, "*", two, on="forward_pre", observe=True),
        hl.attach(model, "*", three, on="forward", observe=True),
        hl.attach(model, "*", two, on="backward_pre"),
        hl.attach(model, "*", three, on="backward") as backward,
    ):
        watched = _train(model)
        assert backward.report().fired == 20 * len(list(model.modules()))
    assert seen
    for key, value in plain.items():
        assert torch.equal(value, watched[key]), key


def test_an_unguarded_draw_on_the_gpu_is_noticed() -> None:
    """Negative control: one random number drawn in a hook makes the comparison fail."""
    plain = _train(_model())
    model = _model()
    with hl.attach(model, lambda module, args, output: torch.rand(1, device="cuda") and None):
        drawn = _train(model)
    assert not torch.equal(plain["rng"], drawn["rng"])


def test_gradients_on_a_gpu_come_with_their_parameters_and_in_order() -> None:
    """backward hooks fire last module first, with this backward's parameter gradients, in autograd's thread."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).cuda()
    order = []

    def note(module, grad_input, grad_output, *, site):
        order.append((site.name, site.step, site.call))
        for parameter in module.parameters(recurse=False):
            assert parameter.grad is not None

    with hl.attach(model, "*", note, on="backward"):
        model(torch.randn(3, 4, device="cuda")).sum().backward()
    assert order == [("2", 0, 0), ("1", 0, 0), ("0", 0, 0), ("", 0, 0)]


def test_a_fused_step_that_the_scaler_skips_is_marked() -> None:
    """The flag is the device's own, and nothing was read on the way."""
    layer = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    found = []
    with hl.attach_optimizer(optimizer, lambda opt, args, kwargs: found.append(opt.found_inf), on="step_post"):
        for factor in (1.0, float("inf")):
            scaler.scale(layer(torch.ones(2, 4, device="cuda")).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [flag.item() for flag in found] == [0.0, 1.0]


class Blocks(nn.Module):
    """Compiled code of their own."""

    def __init__(self, count: int = 3, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("per_block", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_every_call_fires_around_cuda_graphs(train: bool, per_block: bool) -> None:
    """mode="reduce-overhead": ten of ten, forward and gradient, and what a hook has kept stays as it was."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Blocks().cuda().eval()
    x = torch.randn(4, 8, 32, device="cuda")
    expected = []
    with torch.no_grad(), hl.attach(model, "layers.#.mix", lambda m, a, o: expected.append(o.clone()), observe=True):
        for step in range(10):
            model(x + step)
    if per_block:
        for layer in model.layers:
            layer.compile(mode="reduce-overhead", fullgraph=True)
    compiled = model if per_block else torch.compile(model, mode="reduce-overhead", fullgraph=True)
    kept, grads, steps = [], [], []

    def keep(module, args, output, *, site):
        kept.append(output)
        steps.append(site.step)

    with (
        hl.attach(model, "layers.#.mix", keep, observe=True),
        hl.attach(model, "layers.#.mix", lambda m, gi, go: grads.append(go[0]), on="backward", observe=True) as back,
    ):
        for step in range(10):
            torch.compiler.cudagraph_mark_step_begin()
            model.zero_grad()
            with torch.set_grad_enabled(train):
                out = compiled(x + step)
            if train:
                out.sum().backward()
        assert back.report().fired == (30 if train else 0)
        back.remove(quiet=True)
    assert steps == [step for step in range(10) for _ in range(3)]
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(kept, expected, strict=True))
    assert len(grads) == (30 if train else 0)


@pytest.mark.parametrize("compile_it", [False, True])
def test_a_scoped_gradient_hook_fires_although_the_backward_runs_in_another_thread(compile_it: bool) -> None:
    """The owner is read in the forward: autograd's thread for the device has a context of its own."""
    import threading

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).cuda()
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compile_it else model
    call(torch.ones(2, 4, device="cuda")).sum().backward()
    mine: list[float] = []

    def note(module, grad_input, grad_output):
        mine.append(grad_output[0].sum().item())

    def other() -> None:
        (call(torch.ones(2, 4, device="cuda")) * 7).sum().backward()

    with hl.attach(model, "1", note, on="backward", observe=True, scope="context"):
        call(torch.ones(2, 4, device="cuda")).sum().backward()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        call(torch.ones(2, 4, device="cuda")).sum().backward()
    assert mine == [4.0, 4.0]


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node:UserWarning")
def test_somebody_elses_cuda_graph_is_told_of() -> None:
    """While it is recorded, once; and the hook that never fired says why."""
    from hookline.sites import hook_at_site as root

    root._warn_captured.cache_clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).cuda()
    handle = hl.attach(model, "0", lambda m, a, o: None)
    x = torch.randn(2, 4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    model(x)
    torch.cuda.synchronize()
    with pytest.warns(hl.HooklineWarning, match="CUDA graph.*reduce-overhead"), torch.cuda.graph(graph):
        model(x)
    handle.remove(quiet=True)
    graphed = torch.cuda.make_graphed_callables(nn.Sequential(nn.Linear(4, 4)).cuda(), (x,))
    late = hl.attach(graphed, "0", lambda m, a, o: None)
    graphed(x)
    with pytest.warns(hl.errors.HookNeverFired, match="replays a CUDA graph"):
        late.remove()
