"""Looking without touching: find, attached and assert_no_hooks."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.sites.kinds import MODULE


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 2, bias=False)))


def watcher(*args: object) -> None:
    """A hook of any kind that does nothing."""


# -- find ----------------------------------------------------------------------------------------------------


def test_find_returns_every_module_by_default():
    """No target means everything, the model first."""
    assert hl.find(make_model()).names == ["", "0", "1", "2", "2.0"]


def test_find_reads_like_a_list_of_sites():
    """Length, index, slice, iteration and membership work."""
    model = make_model()
    sites = hl.find(model, "#")
    assert isinstance(sites, hl.sites.Sites)
    assert len(sites) == 3
    assert isinstance(sites[0], hl.Site)
    assert sites[0].module is model[0]
    assert sites[-1].name == "2"
    assert isinstance(sites[1:], hl.sites.Sites)
    assert sites[1:].names == ["1", "2"]
    assert [site.name for site in sites] == sites.names
    assert hl.find(model, "1")[0] in sites


def test_a_site_in_a_listing_tells_place_type_and_size():
    """Nothing is firing, so there is no kind and no step."""
    site = hl.find(make_model(), "0")[0]
    assert (site.name, site.type, site.num_parameters) == ("0", "Linear", 9)
    assert (site.kind, site.step, site.call) == (None, -1, 0)


def test_find_takes_the_grammar_of_attach():
    """Types, exclude and errors are the same."""
    model = make_model()
    assert hl.find(model, nn.Linear, exclude="0").names == ["2.0"]
    with pytest.raises(hl.errors.NoMatchError, match="nearest"):
        hl.find(model, "2.1")


def test_find_attaches_nothing():
    """Looking leaves no trace."""
    model = make_model()
    print(hl.find(model))
    hl.assert_no_hooks(model, foreign=True)
    assert hl.attached(model) == []


def test_the_table_shows_name_type_parameters_and_hooks():
    """One line per module, aligned, with a head and a count."""
    model = make_model()
    with hl.attach(model, "0", watcher), hl.attach(model, "0", watcher, on="backward", name="grads"):
        lines = repr(hl.find(model)).splitlines()
    assert lines[0].split() == ["name", "type", "parameters", "hooks"]
    assert lines[2].split() == ["(the", "model)", "Sequential", "15"]
    assert lines[3].split() == ["0", "Linear", "9", "watcher", "(forward),", "grads", "(backward)"]
    assert lines[6].split() == ["2.0", "Linear", "6"]
    assert lines[-1] == "the model and 4 modules"
    assert len({line.index("Linear") for line in lines if "Linear" in line}) == 1


def test_the_table_shows_large_counts_with_commas():
    """Numbers can be read."""
    assert "1,001,000" in repr(hl.find(nn.Linear(1000, 1000)))


def test_the_table_names_other_peoples_hooks_by_their_home():
    """A foreign hook is marked and named by module and function."""
    model = make_model()
    model[0].register_forward_hook(watcher)
    model[0].register_state_dict_post_hook(watcher)
    model[0].register_load_state_dict_pre_hook(watcher)
    sites = hl.find(model, "0")
    found = sites.hooks(sites[0])
    assert found == [
        f"foreign {__name__}.watcher (forward)",
        f"foreign {__name__}.watcher (state_dict)",
        f"foreign {__name__}.watcher (load_state_dict_pre)",
    ]
    assert f"foreign {__name__}.watcher (forward)" in repr(sites)


def test_our_own_ports_are_not_shown_as_foreign():
    """What hookline registers with torch is ours, for every kind."""
    model = make_model()
    handles = [hl.attach(model, "0", watcher, on=kind) for kind in MODULE.args]
    sites = hl.find(model, "*")
    assert not any("foreign" in text for site in sites for text in sites.hooks(site))
    assert sites.hooks(sites[1]) == [f"watcher ({kind.value})" for kind in MODULE.args]
    for handle in handles:
        handle.remove()


def test_a_listing_of_a_lazy_model_prints():
    """Parameters that have no size yet do not break the table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls lazy modules experimental
        model = nn.Sequential(nn.LazyLinear(2), nn.ReLU())
    assert "LazyLinear" in repr(hl.find(model))


def test_shared_parameters_count_once():
    """A tied weight is one set of numbers."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert hl.find(model)[0].num_parameters == 4


# -- attached ------------------------------------------------------------------------------------------------


def test_attached_lists_every_handle_once_oldest_first():
    """One handle per attach, however many modules it is on."""
    model = make_model()
    first = hl.attach(model, "*", watcher, on="backward")
    second = hl.attach(model[2], watcher, prepend=True)
    assert hl.attached(model) == [first, second]
    assert hl.attached(model[2]) == [first, second]
    assert hl.attached(model[0]) == [first]
    first.remove()
    assert hl.attached(model) == [second]
    second.remove()
    assert hl.attached(model) == []


def test_attached_does_not_list_foreign_hooks():
    """Only ours have handles to give."""
    model = make_model()
    model.register_forward_hook(watcher)
    assert hl.attached(model) == []


def test_attached_works_on_a_model_that_contains_itself():
    """A cycle ends."""
    model = make_model()
    model.add_module("me", model)
    handle = hl.attach(model, "0", watcher)
    assert hl.attached(model) == [handle]
    handle.remove()


def test_a_handle_found_by_attached_takes_a_process_wide_hook_off_for_good():
    """Removing what attached() lists is removing the hook, for modules not seen yet too."""
    model, other, fired = make_model(), make_model(), []
    handle = hl.attach_everywhere(lambda *args: fired.append(1))
    try:
        model(torch.ones(1, 2))
        (found,) = hl.attached(model)
        found.remove()
        fired.clear()
        other(torch.ones(1, 2))
        model(torch.ones(1, 2))
        assert fired == []
        hl.assert_no_hooks(other, foreign=True)
        assert not nn.modules.module._has_any_global_hook()
    finally:
        handle.remove()
        for left in (*hl.attached(model), *hl.attached(other)):
            left.remove()


# -- assert_no_hooks -----------------------------------------------------------------------------------------


def test_a_clean_model_passes():
    """Nothing there, nothing raised."""
    hl.assert_no_hooks(make_model())
    hl.assert_no_hooks(make_model(), foreign=True)


@pytest.mark.parametrize("kind", list(MODULE.args))
def test_each_kind_of_hook_of_ours_is_found(kind):
    """The error names module, hook and kind, and is an AssertionError."""
    model = make_model()
    expected = pytest.raises(hl.errors.HooksLeftError, match=rf"2\.0: watcher \({kind.value}\)")
    with hl.attach(model, "2.0", watcher, on=kind), expected as caught:
        hl.assert_no_hooks(model)
    assert isinstance(caught.value, AssertionError)
    hl.assert_no_hooks(model, foreign=True)


def test_foreign_hooks_count_only_when_asked():
    """By default only ours matter."""
    model = make_model()
    model[1].register_forward_pre_hook(watcher)
    hl.assert_no_hooks(model)
    with pytest.raises(hl.errors.HooksLeftError, match=r"1: foreign .*watcher \(forward_pre\)"):
        hl.assert_no_hooks(model, foreign=True)


def test_a_hook_of_ours_whose_name_says_foreign_is_still_ours():
    """The name of a hook is the user's business."""
    model = make_model()
    expected = pytest.raises(hl.errors.HooksLeftError, match="foreign policy")
    with hl.attach(model, "0", watcher, name="foreign policy"), expected:
        hl.assert_no_hooks(model)


def test_a_shared_module_is_reported_once():
    """Two names, one hook."""
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, layer)
    with hl.attach(model, "0", watcher), pytest.raises(hl.errors.HooksLeftError, match=r"^1 hook"):
        hl.assert_no_hooks(model)


def test_a_long_list_is_cut():
    """Eight are shown, the rest counted."""
    model = nn.Sequential(*(nn.Identity() for _ in range(12)))
    with hl.attach(model, "#", watcher), pytest.raises(hl.errors.HooksLeftError, match=r"^12 hooks .*; and 4 more"):
        hl.assert_no_hooks(model)


def test_a_copy_of_a_hooked_model_passes():
    """What a copy keeps of our hooks is nothing to find."""
    model = make_model()
    with hl.attach(model, "*", watcher), hl.attach(model, "*", watcher, on="state_dict_post"):
        hl.assert_no_hooks(copy.deepcopy(model), foreign=True)


def test_the_table_and_the_error_count_the_same_modules():
    """Those inside the model; the model itself is told apart."""
    model = make_model()
    assert repr(hl.find(model)).endswith("\nthe model and 4 modules")
    assert repr(hl.find(model, "0")).endswith("\n1 module")
    with pytest.raises(hl.errors.NoMatchError, match="in this Sequential of 4 modules;"):
        hl.find(model, "*.nowhere")


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("blocks.(0|1)$", r"re\.compile\('blocks\.\(0\|1\)\$'\)"),
        ("blocks[1]", "dots, not brackets: 'blocks.1'"),
        ("blocks.-1", r"names\[-1\]"),
    ],
)
def test_a_target_in_another_grammar_is_answered_with_ours(target: str, hint: str) -> None:
    """A regular expression, brackets of Python and a count from the end get a hint; a plain typo has none."""
    model = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    with pytest.raises(hl.errors.NoMatchError, match=hint):
        hl.find(model, target)
    with pytest.raises(hl.errors.NoMatchError) as typo:
        hl.find(model, "blocks.7")
    assert not re.search("dots|count|regular", str(typo.value))


def test_what_is_left_says_how_to_take_it_off() -> None:
    """A handle that nobody holds any more is found, and what the message shows takes it off."""
    model = nn.Sequential(nn.Linear(2, 2))
    hl.attach(model, "0", lambda module, args, output: None, name="lost")
    with pytest.raises(hl.errors.HooksLeftError, match=r"^1 hook is still attached: 0: lost") as left:
        hl.assert_no_hooks(model)
    exec(str(left.value).split("Ours come off by: ")[1], {"hookline": hl, "model": model})
    hl.assert_no_hooks(model)
