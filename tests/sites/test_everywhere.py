"""One hook on every module: of the process, or of a model; first in line, and gone without a trace."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import hookline as hl
from hookline.sites._torch import HOOK_DICTS

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


def ignore(*args: object) -> None:
    """A hook of any kind that does nothing."""


def run(model: nn.Module) -> None:
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()


def assert_no_trace(model: nn.Module) -> None:
    for module in model.modules():
        for attribute, extras in HOOK_DICTS.items():
            for name in (attribute, *extras):
                assert not getattr(module, name), (name, module)
        assert "_call_impl" not in vars(module)
    hl.assert_no_hooks(model, foreign=True)


# -- reach ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RUN_KINDS)
@pytest.mark.parametrize("process_wide", [True, False])
def test_every_module_fires_once_per_call_from_the_very_first(kind, process_wide):
    """All five modules, in the first call and the second, forward and gradient kinds alike."""
    model, fired = make_model(), []
    scope = {} if process_wide else {"within": model}
    with hl.attach_everywhere(lambda module, *args: fired.append(module), on=kind, **scope) as handle:
        run(model)
        assert sorted(map(id, fired)) == sorted(map(id, model.modules()))
        run(model)
        assert handle.report().fired == 10
    assert_no_trace(model)


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
    """Saving and loading can be hooked within a model, and are refused for the process."""
    model = make_model()
    with pytest.raises(hl.errors.OptionError, match=r"within="):
        hl.attach_everywhere(ignore, on=kind)
    with hl.attach_everywhere(ignore, on=kind, within=model) as handle:
        model.load_state_dict(model.state_dict())
        assert handle.report().fired == 5


def test_modules_made_later_are_reached():
    """A model built after the hook came on fires it, and a child added after the first call does too."""
    fired = []
    with hl.attach_everywhere(lambda module, *args: fired.append(module)):
        model = make_model()
        model(torch.ones(1, 2))
        assert len(fired) == 5
        model.append(nn.Tanh())
        fired.clear()
        model(torch.ones(1, 2))
        assert len(fired) == 6
    assert_no_trace(model)


def test_a_model_that_goes_away_is_let_go():
    """A process-wide hook holds on to no model it has met, whichever kind it is."""
    handles = [hl.attach_everywhere(ignore, on=kind) for kind in RUN_KINDS]
    model = make_model()
    run(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    for handle in handles:
        handle.remove()


def test_names_are_those_seen_from_the_outermost_call():
    """A site is named as in the model that was called."""
    names = []

    def note(module, args, output, *, site):
        names.append(site.name)

    with hl.attach_everywhere(note):
        make_model()(torch.ones(1, 2))
    assert names == ["0", "1", "2.0", "2", ""]


def test_scripted_modules_are_passed_over():
    """A ScriptModule in the model is no obstacle for a process-wide hook."""
    with pytest.warns(DeprecationWarning, match="script"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2), scripted)
    with hl.attach_everywhere(ignore) as handle:
        model(torch.ones(1, 2))
        assert handle.report().fired == 2


# -- the transformer fast path -------------------------------------------------------------------------------


@pytest.mark.parametrize("process_wide", [True, False])
@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
def test_children_of_a_transformer_layer_in_eval_fire(kind, process_wide):
    """The fused inference path, which calls no children, is left; what the layer computes stays."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0).eval()
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 3, 4)
    with torch.no_grad():
        expected = encoder(x)
    fired = []
    scope = {} if process_wide else {"within": encoder}
    with torch.no_grad(), hl.attach_everywhere(lambda module, *args: fired.append(module), on=kind, **scope):
        first = encoder(x)
        count = len(fired)
        second = encoder(x)
    assert encoder.layers[0].linear1 in fired
    assert encoder.layers[1].self_attn in fired
    assert len(fired) == 2 * count
    assert torch.allclose(first, expected, atol=1e-6)
    assert torch.equal(first, second)
    assert_no_trace(encoder)


# -- arguments of the first call -----------------------------------------------------------------------------


class Keywords(nn.Module):
    """Takes its input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, *, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(input=x) * scale


def test_a_first_call_with_keywords_alone_is_seen_whole():
    """A pre-hook and a post-hook with kwargs get them in the first call too."""
    seen = []

    def pre(module, args, kwargs):
        seen.append((type(module).__name__, args, sorted(kwargs)))

    def post(module, args, kwargs, output):
        seen.append((type(module).__name__, args, sorted(kwargs)))

    model = Keywords()
    with hl.attach_everywhere(pre, on="forward_pre", with_kwargs=True), hl.attach_everywhere(post, with_kwargs=True):
        model(x=torch.ones(1, 2), scale=2.0)
    assert seen == [
        ("Keywords", (), ["scale", "x"]),
        ("Linear", (), ["input"]),
        ("Linear", (), ["input"]),
        ("Keywords", (), ["scale", "x"]),
    ]


def test_keywords_can_be_edited_in_the_first_call():
    """What a pre-hook returns is what the forward gets, from the first call on."""
    model = Keywords()

    def edit(module, args, kwargs):
        if isinstance(module, Keywords):
            return args, {**kwargs, "scale": 0.0}
        return None

    with hl.attach_everywhere(edit, on="forward_pre", with_kwargs=True):
        assert model(x=torch.ones(1, 2), scale=2.0).abs().sum() == 0
        assert model(x=torch.ones(1, 2), scale=2.0).abs().sum() == 0


# -- always_call ---------------------------------------------------------------------------------------------


class Fails(nn.Module):
    """Raises what it is told to."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor, *, tag: str = "") -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt("mine")])
@pytest.mark.parametrize("process_wide", [True, False])
@pytest.mark.parametrize("with_kwargs", [True, False])
def test_cleanup_hooks_run_when_the_forward_raises_from_the_first_call(error, process_wide, with_kwargs):
    """Each module's hook runs once per call with output None and the keywords; the error comes through."""
    model, seen = nn.Sequential(Fails(error)), []

    def cleanup(module, args, *more):
        seen.append((type(module).__name__, len(args), *more))

    scope = {} if process_wide else {"within": model}
    with hl.attach_everywhere(cleanup, always_call=True, with_kwargs=with_kwargs, **scope):
        for _ in range(2):
            seen.clear()
            with pytest.raises(type(error), match="mine"):
                model(torch.ones(1))
            more = ({}, None) if with_kwargs else (None,)
            assert seen == [("Fails", 1, *more), ("Sequential", 1, *more)]
        seen.clear()
        with pytest.raises(type(error), match="mine"):
            model[0](torch.ones(1), tag="x")
        assert seen == [("Fails", 1, *(({"tag": "x"}, None) if with_kwargs else (None,)))]
    assert_no_trace(model)


# -- leaving, and neighbours ---------------------------------------------------------------------------------


def test_a_foreign_global_pre_hook_that_edits_is_seen_by_ours():
    """One registered before ours edits the input that our pre-hook gets, from the first call on."""
    seen = []
    theirs = torch_module.register_module_forward_pre_hook(lambda module, args: (args[0] + 1,))
    with hl.attach_everywhere(lambda module, args: seen.append(args[0].item()), on="forward_pre"):
        model = nn.Identity()
        model(torch.zeros(1))
        model(torch.zeros(1))
    theirs.remove()
    assert seen == [1, 1]
