"""One hook on every module of the process: first in line, and gone without a trace."""

from __future__ import annotations

import pytest
import torch
from helpers_modules import assert_untouched
from helpers_sites import ignore
from torch import nn
from torch.nn.modules import module as torch_module

import hookline as hl

RUN_KINDS = ["forward_pre", "forward", "backward_pre", "backward", "full_backward"]
GLOBAL_DICTS = [
    name for name in vars(torch_module) if name.startswith("_global_") and name.endswith(("hooks", "kwargs", "called"))
]


@pytest.fixture(autouse=True)
def nothing_global_is_left(monkeypatch):
    """Every test ends without a global hook; one that fails takes its own hooks off for the next."""
    handles, attach_everywhere = [], hl.attach_everywhere

    def noted(*args: object, **options: object) -> hl.HookHandle:
        handles.append(attach_everywhere(*args, **options))
        return handles[-1]

    monkeypatch.setattr(hl, "attach_everywhere", noted)
    yield
    left = [name for name in GLOBAL_DICTS if getattr(torch_module, name)]
    for handle in handles:
        handle.remove()
    assert left == []


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))


def run(model: nn.Module) -> None:
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()


# -- reach ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RUN_KINDS)
def test_the_first_call_hands_over_what_later_calls_do(kind):
    """Arguments of the hook are the same in the first and the second call, names included."""
    model, seen = make_model(), []

    def note(module: nn.Module, *args: object, site: hl.Site) -> None:
        shapes = [
            None if v is None else tuple(v.shape)
            for part in args
            for v in (part if isinstance(part, tuple) else (part,))
        ]
        seen.append((site.name, site.call, shapes))

    def with_site(*args, site):
        note(*args, site=site)

    with hl.attach_everywhere(with_site, on=kind):
        run(model)
        first, seen = seen, []
        run(model)
    assert first == seen
    assert [name for name, _, _ in first]


@pytest.mark.parametrize("kind", ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"])
def test_state_kinds_need_a_model(kind):
    """Saving and loading are refused for the process, with the way out."""
    with pytest.raises(hl.errors.OptionError, match=r"attach\(model, '\*', hook\)"):
        hl.attach_everywhere(ignore, on=kind)


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
def test_modules_made_later_are_reached(kind):
    """A model built after the hook came on fires it, and a child added after the first call does too."""
    fired = []
    with hl.attach_everywhere(lambda module, *args: fired.append(module), on=kind):
        model = make_model()
        model(torch.ones(1, 2))
        assert len(fired) == 5
        model.append(nn.Tanh())
        fired.clear()
        model(torch.ones(1, 2))
        assert len(fired) == 6
    assert_untouched(model)


def test_names_are_those_seen_from_the_outermost_call():
    """A site is named as in the model that was called."""
    names = []

    def note(module, args, output, *, site):
        names.append(site.name)

    with hl.attach_everywhere(note):
        make_model()(torch.ones(1, 2))
    assert names == ["0", "1", "2.0", "2", ""]


# -- the transformer fast path -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
def test_children_of_a_transformer_layer_in_eval_fire(kind):
    """The fused inference path, which calls no children, is left; what the layer computes stays."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0).eval()
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 3, 4)
    with torch.no_grad():
        expected = encoder(x)
    fired = []
    with torch.no_grad(), hl.attach_everywhere(lambda module, *args: fired.append(module), on=kind):
        first = encoder(x)
        count = len(fired)
        second = encoder(x)
    assert encoder.layers[0].linear1 in fired
    assert encoder.layers[1].self_attn in fired
    assert len(fired) == 2 * count
    assert torch.allclose(first, expected, atol=1e-6)
    assert torch.equal(first, second)
    assert_untouched(encoder)


def test_a_kind_that_is_no_name_is_refused() -> None:
    """A list of kinds is no kind."""
    with pytest.raises(hl.errors.KindError, match="forward"):
        hl.attach_everywhere(lambda *args: None, on=["forward"])  # type: ignore[arg-type]
