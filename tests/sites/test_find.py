"""Looking without touching: find, attached and assert_no_hooks."""

from __future__ import annotations

import re

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


# -- assert_no_hooks -----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("target", "hint"),
    [("blocks.(0|1)$", r"re\.compile\('blocks\.\(0\|1\)\$'\)"), ("blocks[1]", "dots, not brackets: 'blocks.1'")],
)
def test_a_target_in_another_grammar_is_answered_with_ours(target: str, hint: str) -> None:
    """A regular expression, brackets of Python and a count from the end get a hint; a plain typo has none."""
    model = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    with pytest.raises(hl.errors.NoMatchError, match=hint):
        hl.find(model, target)
    with pytest.raises(hl.errors.NoMatchError) as typo:
        hl.find(model, "blocks.7")
    assert not re.search("dots|count|regular", str(typo.value))


@pytest.mark.parametrize(
    ("target", "near"),
    [("*.atn", "nearest: 'gpt.h.0.attn', "), ("h.#.mpl", "nearest: 'gpt.h.0.mlp'"), ("mpl", "nearest: 'gpt.h.0.mlp'")],
)
def test_a_glob_or_a_short_name_is_answered_with_names_that_have_such_a_part(target: str, near: str) -> None:
    """What is between the wildcards is compared with the parts of each name."""
    blocks = [nn.ModuleDict({"attn": nn.Identity(), "mlp": nn.Identity()}) for _ in range(2)]
    with pytest.raises(hl.errors.NoMatchError, match=near):
        hl.find(nn.ModuleDict({"gpt": nn.ModuleDict({"h": nn.ModuleList(blocks)})}), target)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_error_about_a_scripted_module_names_it() -> None:
    """So one knows what to leave out."""
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(hl.errors.UnhookableError, match="'1' is a ScriptModule"):
        hl.attach(model, "*", lambda module, args, output: None)
    hl.attach(model, "*", lambda module, args, output: None, exclude="1").remove()


def test_what_is_left_says_how_to_take_it_off() -> None:
    """A handle that nobody holds any more is found, and what the message shows takes it off."""
    model = nn.Sequential(nn.Linear(2, 2))
    hl.attach(model, "0", lambda module, args, output: None, name="lost")
    with pytest.raises(hl.errors.HooksLeftError, match=r"^1 hook is still attached: 0: lost") as left:
        hl.assert_no_hooks(model)
    exec(str(left.value).split("Ours come off by: ")[1], {"hookline": hl, "model": model})
    hl.assert_no_hooks(model)
