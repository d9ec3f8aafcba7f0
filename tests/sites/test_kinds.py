"""The kinds: names, aliases, what a hook of each is called with, and which options go with which."""

from __future__ import annotations

import pytest
from helpers_sites import SITES

import hookline as hl
from hookline.sites.attach import new_attachment
from hookline.sites.hook_at_site import AttachOptions
from hookline.sites.kinds import NODE, SITE_TYPES, Kind

NAMES = [
    "forward_pre",
    "forward",
    "backward_pre",
    "backward",
    "full_backward",
    "state_dict_pre",
    "state_dict_post",
    "load_state_dict_pre",
    "load_state_dict_post",
    "param_grad",
]
REGISTERING = {"register_module", "register_parameter", "register_buffer"}
EDITING = {"forward_pre", "forward", "backward_pre", "backward", "full_backward"}
TAKES = {"with_kwargs": {"forward_pre", "forward"}, "always_call": {"forward"}, "observe": EDITING}


def test_every_kind_belongs_to_something_and_nothing_has_others():
    """What the site types take together is what kinds there are."""
    assert {kind for site_type in SITE_TYPES for kind in site_type.args} == set(Kind)


def test_every_kind_is_held_to_the_promises_of_all():
    """The conformance tests have a place for each but torch's own registration hooks; a new kind needs one there."""
    tested = {site.values[0].args[0] for site in SITES}
    assert {NODE.aliases.get(kind, kind) for kind in tested} == {kind.value for kind in Kind} - REGISTERING


@pytest.mark.parametrize("site_type", SITE_TYPES, ids=lambda site_type: site_type.verb)
def test_each_site_type_takes_its_own_kinds_and_sends_the_others_home(site_type):
    """For all kinds there are: taken, or answered with a site type that takes it."""
    for kind in Kind:
        if kind in site_type.args:
            assert Kind.parse(kind.value, site_type) is kind
            continue
        with pytest.raises(hl.errors.KindError, match=r"put it on with (\w+)\.") as caught:
            Kind.parse(kind, site_type)
        verb = str(caught.value).rpartition(" ")[2].rstrip(".")
        assert kind in next(other for other in SITE_TYPES if other.verb == verb).args


def test_an_alias_holds_where_it_is_one():
    """pre and post are kinds of a node, not of a module."""
    assert Kind.parse("pre", NODE) is Kind.NODE_PRE
    assert Kind.parse("post", NODE) is Kind.NODE_POST
    with pytest.raises(hl.errors.KindError, match="No kind 'pre'"):
        Kind.parse("pre")


@pytest.mark.parametrize(("alias", "kind"), [("forward_post", Kind.FORWARD), ("backward_post", Kind.BACKWARD)])
def test_the_other_sources_names_are_aliases(alias, kind):
    """Post-hooks may be asked for as such."""
    assert Kind.parse(alias) is kind


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("foward", "forward"), ("forwrd_pre", "forward_pre"), ("bakward", "backward"), ("state_dict", "state_dict_pre")],
)
def test_a_mistyped_kind_is_answered_with_the_nearest(typo, meant):
    """The error names what was probably meant."""
    with pytest.raises(hl.errors.KindError, match=rf"'{typo}'.*Nearest: .*'{meant}'"):
        Kind.parse(typo)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", sorted(TAKES))
def test_an_option_goes_with_its_kinds_and_no_other(name, option):
    """The table of options and kinds, both ways."""
    kind = Kind(name)
    if name in TAKES[option]:
        new_attachment(lambda *args: None, kind, AttachOptions(**{option: True}))
    else:
        with pytest.raises(hl.errors.OptionError, match=rf"{option}= does not go with on='{name}'; it goes with"):
            new_attachment(lambda *args: None, kind, AttachOptions(**{option: True}))
