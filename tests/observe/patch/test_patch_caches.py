"""What other runs have left behind: ``swap`` and ``mean_ablate``, with a capture's cache and with plain dicts."""

from __future__ import annotations

import pytest
import torch
from helpers_patch import Twice, made
from torch import nn

import hookline as hl
from hookline.errors import OptionError


def _runs():
    """A model, and the inputs of a clean and of a corrupted run."""
    model, clean = made()
    return model, clean, torch.randn(2, 3, 4)


def test_swapping_a_layer_gives_the_other_run_from_there_on():
    """With all of its activation from the clean run, the output is the clean one."""
    model, clean, corrupted = _runs()
    with torch.no_grad(), hl.capture(model, "layers.#") as cache:
        expected = model(clean)
    with hl.patch(model, {"layers.1": hl.edits.swap(cache)}):
        assert torch.equal(model(corrupted), expected)


@pytest.mark.parametrize("index", [(slice(None), 1), (slice(None), [0, 2]), (..., slice(0, 2)), torch.eye(2, 3) > 0])
def test_swapping_a_part_takes_the_same_part_of_both_runs(index):
    model, clean, corrupted = _runs()
    with torch.no_grad(), hl.capture(model, "layers.#") as cache:
        model(clean)
    with hl.patch(model, {"layers.1": hl.edits.swap(cache, index=index)}), hl.capture(model, "layers.1") as after:
        model(corrupted)
    expected = model.layers[1](model.layers[0](corrupted)).clone()
    expected[index] = cache["layers.1"].output[index]
    assert torch.equal(after["layers.1"].output, expected)


@pytest.mark.parametrize("kind", ["twice in a forward", "two forwards"])
def test_a_cache_of_several_calls_does_not_say_which(kind):
    """The error names what does; a function that asks for the call puts each in its place."""
    twice = kind == "twice in a forward"
    model, clean = made(Twice) if twice else made()
    name = "layer" if twice else "layers.1"
    with torch.no_grad(), hl.capture(model, name) as cache:
        expected = model(clean) if twice else (model(clean), model(clean))
    with pytest.raises(hl.errors.OptionError, match=rf"one call of '{name}'.*holds 2.*clear\(\).*replace.*site\.call"):
        hl.patch(model, {name: hl.edits.swap(cache)})
    hl.assert_no_hooks(model)
    if twice:
        with hl.patch(model, {name: lambda x, *, site: cache[name].calls[site.call].tensor}):
            assert torch.equal(model(torch.randn(2, 3, 4)), expected)


# -- means ---------------------------------------------------------------------------------------------------------


def _mean_put_in(activations, x_shape, **options):
    """What a mean ablation puts in the place of an activation."""
    model = nn.Identity()
    with hl.patch(model, {"": hl.edits.mean_ablate({"": activations}, **options)}):
        return model(torch.zeros(x_shape))


def test_the_mean_is_one_number_for_each_unit():
    """Over batch and positions, whatever this run has; of images that of a channel; a vector is its own mean."""
    given, image = torch.randn(5, 7, 4), torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(_mean_put_in(given, (2, 3, 4)), given.mean((0, 1)).expand(2, 3, 4))
    found = _mean_put_in(image, (2, 3, 4, 4))
    torch.testing.assert_close(found, image.mean((0, 2, 3)).view(1, 3, 1, 1).expand(2, 3, 4, 4))
    assert torch.equal(_mean_put_in(given[0, 0], (2, 3, 4)), given[0, 0].expand(2, 3, 4))


def test_calls_of_all_forwards_count_by_their_size():
    """A batch of six weighs three times as much as one of two."""
    model, _ = made()
    inputs = torch.randn(2, 3, 4), torch.randn(6, 5, 4)
    with torch.no_grad(), hl.capture(model, "layers.0") as cache:
        rows = [model.layers[0](x).flatten(0, 1) for x in inputs]
        cache.clear()
        for x in inputs:
            model(x)
    with hl.patch(model, {"layers.0": hl.edits.mean_ablate(cache)}), hl.capture(model, "layers.0") as after:
        model(inputs[0])
    torch.testing.assert_close(after["layers.0"].output, torch.cat(rows).mean(0).expand(2, 3, 4))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [([(0, 4)], "nothing to average for 'layers.0'"), ([(2, 4), (2, 5)], r"differ: \(2, 4\), \(2, 5\)")],
)
def test_what_has_no_mean_is_refused(shapes, words):
    """Nothing at all, and calls of different widths."""
    model, _ = made()
    inner = nn.ModuleDict({"layers": nn.ModuleList([nn.Identity()])})
    with hl.capture(inner, "layers.0") as cache:
        for shape in shapes:
            inner["layers"][0](torch.ones(shape))
    with pytest.raises(OptionError, match=words):
        hl.patch(model, {"layers.0": hl.edits.mean_ablate(cache)})
