"""Analyses of mean gradients against formulas in float64; reference weights from all sorts of files."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers_analyses import P, context, cos, flat, made, random_grads, token_experiment
from safetensors.torch import save_file

import hookline as hl
from hookline.errors import HooklineWarning
from hookline.lifecycle.managed_hooks import read_weights


def shown(hook, model, seeds, **given):
    """What it returns for one gradient after the other, and the gradients."""
    grads = [random_grads(model, seed) for seed in seeds]
    found = [hook.compute(context(model, accumulated_grads=grad, **given)) for grad in grads]
    return found, grads


def test_norms_are_lengths_of_the_gradient_without_biases(model):
    """As a whole and by parameter; a bias has no entry."""
    (found,), (grads,) = shown(made("norms"), model, [1])
    whole = flat(grads)
    assert found["total_norm"].item() == pytest.approx(np.linalg.norm(whole), rel=1e-6)
    assert found["max_component"].item() == pytest.approx(np.abs(whole).max(), rel=1e-6)
    assert found["mean_component"].item() == pytest.approx(np.abs(whole).mean(), rel=1e-6)
    weight = grads["attention.in_proj_weight"].double().numpy()
    assert found["norm_attention.in_proj_weight"].item() == pytest.approx(np.linalg.norm(weight), rel=1e-6)
    assert "norm_hidden.weight" in found
    assert not any("bias" in name for name in found)


def test_consecutive_is_the_angle_to_the_gradient_before(model):
    """Nothing the first time; a gradient turned round is at 180 degrees."""
    hook = made("consecutive")
    (first, second), (one, other) = shown(hook, model, [1, 2])
    assert first is None
    expected = cos(flat(one), flat(other))
    assert second["cos_sim"].item() == pytest.approx(expected, rel=1e-5)
    assert second["angle_degrees"].item() == pytest.approx(math.degrees(math.acos(expected)), rel=1e-5)
    back = hook.compute(context(model, accumulated_grads={name: -grad for name, grad in other.items()}))
    assert back["angle_degrees"].item() == pytest.approx(180, abs=0.1)


def test_variance_is_over_the_newest_gradients_of_the_window(model):
    """Six gradients, a window of four: the first two do not count."""
    found, grads = shown(made("variance", window_size=4), model, range(6))
    assert found[0] is None
    rows = np.stack([flat(grad) for grad in grads[-4:]])
    mean = rows.mean(0)
    pairs = [cos(rows[i], rows[j]) for i in range(4) for j in range(i)]
    assert found[-1]["gradient_variance"] == pytest.approx(((rows - mean) ** 2).mean(), rel=1e-5)
    assert found[-1]["mean_pairwise_cos"] == pytest.approx(np.mean(pairs), rel=1e-5)
    noise = np.linalg.norm(rows.std(0, ddof=1))
    assert found[-1]["signal_to_noise"] == pytest.approx(np.linalg.norm(mean) / noise, rel=1e-5)
    assert found[-1]["window_mean_norm"] == pytest.approx(np.linalg.norm(mean), rel=1e-6)


def test_subspace_has_the_singular_values_of_the_centred_window(model):
    """Against a decomposition of the matrix itself; seven gradients, a window of six."""
    hook = made("subspace_gradient_info", window_size=6, n_components=5)
    reference = {name: value + random_grads(model, 77).get(name, 0) for name, value in model.state_dict().items()}
    hook.set_reference_weights(reference)
    found, grads = shown(hook, model, range(7))
    assert found[0] is None
    rows = np.stack([flat(grad) for grad in grads[-6:]])
    rows -= rows.mean(0)
    _, values, directions = np.linalg.svd(rows, full_matrices=False)
    squares, last = values**2, found[-1]
    assert last["svd_total_variance"] == pytest.approx(squares.sum(), rel=1e-5)
    assert last["participation_ratio"] == pytest.approx(squares.sum() ** 2 / (squares**2).sum(), rel=1e-5)
    assert last["top_sv_ratio"] == pytest.approx(values[0] / values.sum(), rel=1e-3)
    shares = np.cumsum(squares) / squares.sum()
    assert last["dims_for_90pct"] == int(np.argmax(shares >= 0.9)) + 1
    assert last["top1_explained"] == pytest.approx(shares[0], rel=1e-5)
    assert last["top5_explained"] == pytest.approx(shares[4], rel=1e-5)
    assert last["top10_explained"] == pytest.approx(1.0, rel=1e-5)
    way = flat({name: reference[name] - p for name, p in model.named_parameters()})
    energies = squares * (directions @ (way / np.linalg.norm(way))) ** 2
    expected = energies[:5].sum() / squares.sum()
    assert last["grad_energy_fraction_toward_solution"] == pytest.approx(expected, rel=1e-4)
    assert last["top1_energy_fraction_toward_solution"] == pytest.approx(energies[0] / squares.sum(), rel=1e-3)
    assert last["top5_energy_fraction_toward_solution"] == pytest.approx(expected, rel=1e-4)
    assert "top10_energy_fraction_toward_solution" not in last


@pytest.mark.parametrize("name", ["gradient_projection", "subspace_gradient_info"])
def test_a_reference_saved_under_ddp_is_a_reference_and_lasts_one_run(model, name):
    """Names with ``module.`` in front give the same numbers; loading a state keeps it, another run has its own."""
    plain = {name: value + 1 for name, value in model.state_dict().items()}
    wanted, saved = [], {f"module.{name}": value for name, value in plain.items()}
    for reference in (plain, saved):
        hook = made(name)
        hook.set_reference_weights(reference)
        hook.load_state_dict(hook.state_dict())
        wanted.append(shown(hook, model, range(3))[0])
    assert wanted[0] == wanted[1]
    assert any("solution" in metric or "distance" in metric for metric in wanted[0][-1])
    hook.reset()
    assert not hook.reference_weights


def test_gradient_projection_compares_descent_and_move_with_the_way_to_the_reference(model):
    """From the weights of the report before; the first time there is only the distance."""
    hook = made("gradient_projection")
    goal = {name: p.detach() + random_grads(model, 5)[name] for name, p in model.named_parameters()}
    hook.set_reference_weights(goal)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = hook.compute(context(model, accumulated_grads=random_grads(model, 1)))
    assert list(first) == ["distance_to_reference"]
    with torch.no_grad():
        for name, p in model.named_parameters():
            p += 0.1 * random_grads(model, 6)[name]
    grads = random_grads(model, 2)
    found = hook.compute(context(model, accumulated_grads=grads))
    arrays = {name: [t.double().numpy() for t in (goal[name] - before[name], -grads[name])] for name in before}
    moves = {name: (p.detach() - before[name]).double().numpy() for name, p in model.named_parameters()}
    name = "hidden.weight"
    assert found[f"grad_cossim_to_solution/{name}"] == pytest.approx(cos(arrays[name][1], arrays[name][0]), rel=1e-4)
    assert found[f"disp_cossim_to_solution/{name}"] == pytest.approx(cos(moves[name], arrays[name][0]), rel=1e-4)
    assert "grad_cossim_to_solution/hidden.bias" not in found
    way, descent, move = (
        np.concatenate([part.ravel() for part in parts])
        for parts in ([a for a, _ in arrays.values()], [b for _, b in arrays.values()], moves.values())
    )
    assert found["overall_grad_cossim_to_solution"] == pytest.approx(cos(descent, way), rel=1e-4)
    assert found["overall_disp_cossim_to_solution"] == pytest.approx(cos(move, way), rel=1e-4)
    by_layer = [cos(b, a) for a, b in arrays.values()]
    assert found["mean_layer_grad_cossim_to_solution"] == pytest.approx(np.mean(by_layer), rel=1e-4)
    by_layer = [cos(moves[name], arrays[name][0]) for name in moves]
    assert found["mean_layer_disp_cossim_to_solution"] == pytest.approx(np.mean(by_layer), rel=1e-4)
    assert found["displacement_norm"] == pytest.approx(np.linalg.norm(move), rel=1e-4)
    assert found["distance_to_reference"].item() == pytest.approx(np.linalg.norm(way - move), rel=1e-5)


def test_token_gradient_measures_inequality_over_rows(model):
    """Rows of known lengths: one token has half of everything."""
    lengths = np.array([10.0, 4, 3, 2, 1, 0.05, 0, 0, 0, 0, 0])
    direction = torch.nn.functional.normalize(torch.randn(P, 8), dim=1)
    grads = random_grads(model, 1) | {"embedding.weight": direction * torch.tensor(lengths)[:, None].float()}
    found = made("token_gradient").compute(context(model, accumulated_grads=grads))
    assert found["gradient_sparsity"] == pytest.approx(6 / 11)
    apart = np.abs(lengths[:, None] - lengths[None]).mean() / (2 * lengths.mean())
    assert found["gradient_gini"] == pytest.approx(apart, rel=1e-5)
    groups = [lengths[i::3].mean() for i in range(3)]
    assert found["stride_group_variance"] == pytest.approx(np.var(groups), rel=1e-5)
    assert found["stride_group_max_ratio"] == pytest.approx(max(groups) / np.mean(groups), rel=1e-5)
    assert (found["tokens_for_50pct"], found["tokens_for_90pct"]) == (2, 4)
    assert found["concentration_ratio"] == pytest.approx(2 / 11)


def test_phases_tell_speed_of_change_and_how_far_it_has_come(model):
    """Zero the first time; the embedding is compared with that of the last snapshot."""
    hook, snapshot = made("phases"), hl.HookPoint.SNAPSHOT
    norms, tables, found = [], [], []
    for seed, accuracy in enumerate([0.01, 0.1, 0.5, 0.9, 0.995]):
        with torch.no_grad():
            model.embedding.weight += 0.1 * torch.randn(P, 8)
        grads = random_grads(model, seed, scale=1 + seed**2)
        norms.append(np.linalg.norm(flat(grads)))
        tables.append(model.embedding.weight.detach().double().numpy().copy())
        found.append(hook.compute(context(model, snapshot, accumulated_grads=grads, val_acc=accuracy)))
    assert [each["phase_code"] for each in found] == [0, 1, 2, 3, 4]
    assert float(found[0]["grad_velocity"]) == float(found[0]["embedding_change"]) == 0
    assert float(found[3]["grad_velocity"]) == pytest.approx(norms[3] - norms[2], rel=1e-4)
    expected = (norms[3] - norms[2]) - (norms[2] - norms[1])
    assert float(found[3]["grad_acceleration"]) == pytest.approx(expected, rel=1e-4)
    change = np.linalg.norm(tables[3] - tables[2])
    assert float(found[3]["embedding_change"]) == pytest.approx(change, rel=1e-5)
    share = change / np.linalg.norm(tables[2])
    assert float(found[3]["embedding_change_normalized"]) == pytest.approx(share, rel=1e-5)


def test_a_window_that_would_not_fit_is_not_begun(model):
    """It says how much it would take."""
    hook = made("variance", max_gib=1e-6)
    with pytest.warns(HooklineWarning, match=r"would keep 10 gradients in 0\.0 GiB, and max_gib=1e-06"):
        assert hook.compute(context(model, accumulated_grads=random_grads(model, 1))) is None
    assert hook.window.count == 0


def same(found, model) -> bool:
    wanted = model.state_dict()
    return all(torch.equal(found[name], value) for name, value in wanted.items()) and found.keys() >= wanted.keys()


def test_a_run_is_compared_with_the_end_of_the_one_before(tmp_path):
    """By its last checkpoint: the same run again ends at distance 0, and began at one over 0."""
    first = token_experiment()
    hl.epoch_loop(first, epochs=3, checkpoints=hl.Checkpoints(tmp_path / "checkpoints", every=1))
    last = max((tmp_path / "checkpoints").glob("*.pt"))
    assert same(read_weights(last), first.model)
    sink = hl.sinks.MemorySink()
    manager = hl.HookManager(["gradient_projection"], reference_weights=last, sinks=[sink])
    hl.epoch_loop(token_experiment(), epochs=3, manager=manager)
    distances = [record.metrics["gradient_projection/distance_to_reference"] for record in sink.records
                 if "gradient_projection/distance_to_reference" in record.metrics]  # fmt: skip
    assert distances[0] > 0.01
    assert distances[-1] == 0.0


def test_files_of_others(tmp_path):
    """Plain safetensors, a state dict, and one beside other things."""
    model = token_experiment().model
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "checkpoint.pt")
    for name in ("weights.safetensors", "weights.pt", "checkpoint.pt"):
        assert same(read_weights(tmp_path / name), model)
