"""Which metrics stand side by side on the map."""

from __future__ import annotations

from hookline.report.metric_series import LayerPlace, layer_places


def test_the_statistics_of_a_watch_are_placed_by_layer_and_kind() -> None:
    """Whatever the layers are called; a summary of the whole model has no layer."""
    found = layer_places(
        ["stats/encoder/forward/mean", "stats/a/b.0/param_grad/norm", "stats/forward/mean", "train/loss"]
    )
    assert found == {
        "stats/encoder/forward/mean": LayerPlace("stats/forward", "mean", "encoder"),
        "stats/a/b.0/param_grad/norm": LayerPlace("stats/param_grad", "norm", "a/b.0"),
    }


def test_other_hooks_are_placed_by_the_part_that_looks_like_a_layer() -> None:
    """At the end or in the middle; of layers and their units, the units are the rows."""
    names = [f"norms/grad/layers.{i}.weight" for i in range(4)]
    names += [f"gradient_flow/fc{i}/norm" for i in range(3)]
    names += [f"activations/relu/fc{i}/{unit}" for i in range(2) for unit in range(8)]
    found = layer_places(names)
    assert found["norms/grad/layers.2.weight"] == LayerPlace("norms", "grad", "layers.2.weight")
    assert found["gradient_flow/fc1/norm"] == LayerPlace("gradient_flow", "norm", "fc1")
    assert found["activations/relu/fc1/5"] == LayerPlace("activations/relu", "fc1", "5")


def test_names_that_only_share_a_hook_are_no_layers() -> None:
    """Words are none, two are too few, and what the loop measures is looked at as it is."""
    names = ["fisher/all/mean", "fisher/all/max", "fisher/all/sum", "h/m/l.0", "h/m/l.1"]
    names += [f"eval/top/{k}" for k in range(5)]
    assert layer_places(names) == {}
