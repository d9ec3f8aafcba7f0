"""The kinds: names, aliases, what a hook of each is called with, and which options go with which."""

from __future__ import annotations

import copy
import pickle

import pytest
from helpers_sites import SITES
from hypothesis import given, settings
from hypothesis import strategies as st

import hookline as hl
from hookline.sites.hook_at_site import AttachOptions
from hookline.sites.kinds import MODULE, NODE, SITE_TYPES, Kind

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
    "register_module",
    "register_parameter",
    "register_buffer",
]
REGISTERING = {"register_module", "register_parameter", "register_buffer"}
EDITING = {"forward_pre", "forward", "backward_pre", "backward", "full_backward", *REGISTERING}
TAKES = {"with_kwargs": {"forward_pre", "forward"}, "always_call": {"forward"}, "observe": EDITING}


def test_the_kinds_of_a_module_are_exactly_these():
    """Thirteen kinds: those of a run in the order they come up, of saving and loading, of parameters, of building."""
    assert [kind.value for kind in MODULE.args] == NAMES


def test_every_kind_belongs_to_something_and_nothing_has_others():
    """What the site types take together is what kinds there are."""
    assert {kind for site_type in SITE_TYPES for kind in site_type.args} == set(Kind)


def test_every_kind_is_held_to_the_promises_of_all():
    """The conformance tests have a place for each but torch's own registration hooks; a new kind needs one there."""
    tested = {site.values[0].args[0] for site in SITES}
    assert {NODE.aliases.get(kind, kind) for kind in tested} == {kind.value for kind in Kind} - REGISTERING


@pytest.mark.parametrize(
    ("name", "noun", "verb"),
    [
        ("step_pre", "optimizer", "attach_optimizer"),
        ("step_post", "optimizer", "attach_optimizer"),
        ("grad", "tensor", "attach_tensor"),
        ("node_pre", "graph node", "attach_node"),
        ("node_post", "graph node", "attach_node"),
        ("saved_tensors", "scope", "saved_tensors"),
    ],
)
def test_a_kind_of_another_site_type_is_answered_with_the_verb_to_use(name, noun, verb):
    """Every kind that a module does not have names what has it, and that call exists."""
    with pytest.raises(hl.errors.KindError, match=rf"on='{name}' is a kind of {noun} hook; put it on with {verb}\."):
        Kind.parse(name)
    assert callable(getattr(hl, verb))


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


@pytest.mark.parametrize("name", NAMES)
def test_a_kind_is_found_by_name_and_is_its_own_name(name):
    """``on="forward"`` and ``on=Kind.FORWARD`` are the same, and print the same."""
    kind = Kind.parse(name)
    assert kind.value == name
    assert kind == name
    assert str(kind) == name
    assert Kind.parse(kind) is kind


@pytest.mark.parametrize(("alias", "kind"), [("forward_post", Kind.FORWARD), ("backward_post", Kind.BACKWARD)])
def test_the_other_sources_names_are_aliases(alias, kind):
    """Post-hooks may be asked for as such."""
    assert Kind.parse(alias) is kind


@pytest.mark.parametrize(
    "name", ["legacy_backward", "backward_hook", "register_backward_hook", "non_full_backward", "backward_legacy"]
)
def test_the_legacy_backward_hook_is_refused_with_a_pointer(name):
    """torch's deprecated hook is named as such, with what to use."""
    with pytest.raises(hl.errors.KindError, match=r"deprecated.*use on='backward'"):
        Kind.parse(name)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("foward", "forward"), ("forwrd_pre", "forward_pre"), ("bakward", "backward"), ("state_dict", "state_dict_pre")],
)
def test_a_mistyped_kind_is_answered_with_the_nearest(typo, meant):
    """The error names what was probably meant."""
    with pytest.raises(hl.errors.KindError, match=rf"'{typo}'.*Nearest: .*'{meant}'"):
        Kind.parse(typo)


@settings(deadline=None, max_examples=100)
@given(st.one_of(st.none(), st.integers(), st.booleans(), st.floats(), st.binary(), st.text()))
def test_whatever_is_no_kind_is_a_kind_error(value):
    """Nothing but a name or a kind passes, and everything else fails as one error."""
    if isinstance(value, str) and (value in list(Kind) or value in ("forward_post", "backward_post")):
        return
    with pytest.raises(hl.errors.KindError, match="Kinds: forward_pre, forward, "):
        Kind.parse(value)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_argument_of_a_hook_is_what_it_is_on(name):
    """The module, or for param_grad the parameter, and no argument name comes twice."""
    args = MODULE.args[Kind(name)]
    assert args[0] == ("parameter" if name == "param_grad" else "module")
    assert len(set(args)) == len(args)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("forward_pre", ("module", "args")),
        ("forward", ("module", "args", "output")),
        ("backward_pre", ("module", "grad_output")),
        ("backward", ("module", "grad_input", "grad_output")),
        ("full_backward", ("module", "grad_input", "grad_output")),
        ("state_dict_pre", ("module", "prefix", "keep_vars")),
        ("state_dict_post", ("module", "state_dict", "prefix", "local_metadata")),
        ("load_state_dict_post", ("module", "incompatible_keys")),
        ("param_grad", ("parameter",)),
        ("register_module", ("module", "name", "submodule")),
        ("register_parameter", ("module", "name", "parameter")),
        ("register_buffer", ("module", "name", "buffer")),
    ],
)
def test_the_arguments_are_those_of_torch(name, args):
    """A hook written for torch fits."""
    assert MODULE.args[Kind(name)] == args


def test_a_load_pre_hook_takes_the_eight_arguments_of_torch():
    """The longest one, in torch's order."""
    assert MODULE.args[Kind.LOAD_STATE_DICT_PRE][1:] == (
        "state_dict",
        "prefix",
        "local_metadata",
        "strict",
        "missing_keys",
        "unexpected_keys",
        "error_msgs",
    )


@pytest.mark.parametrize("name", NAMES)
def test_state_kinds_are_the_four_of_saving_and_loading(name):
    """By name, and by nothing else."""
    assert Kind(name).is_state == ("state_dict" in name)


def test_the_kinds_of_nodes_are_listed_as_they_are_written():
    """By their short names, also among the nearest."""
    with pytest.raises(hl.errors.KindError, match=r"Nearest: 'pre'\. Kinds: pre, post\.\n"):
        Kind.parse("pre_", NODE)


@pytest.mark.parametrize("name", NAMES)
def test_registration_kinds_are_the_three_of_building(name):
    """Those that fire when something is stored in a module."""
    assert Kind(name).is_registration == (name in REGISTERING)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_kinds_are_the_two_of_our_own(name):
    """torch's full backward hook is not built on our gradient observation."""
    assert Kind(name).is_gradient == (name in ("backward", "backward_pre"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", sorted(TAKES))
def test_an_option_goes_with_its_kinds_and_no_other(name, option):
    """The table of options and kinds, both ways."""
    kind = Kind(name)
    if name in TAKES[option]:
        AttachOptions(**{option: True}).check(kind)
    else:
        with pytest.raises(hl.errors.OptionError, match=rf"{option}= does not go with on='{name}'; it goes with"):
            AttachOptions(**{option: True}).check(kind)


@pytest.mark.parametrize("name", NAMES)
def test_an_option_that_is_off_is_never_refused(name):
    """Passing the default explicitly is no error."""
    AttachOptions(with_kwargs=False, always_call=False, observe=False).check(Kind(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_kind_survives_copies_and_pickling_as_itself(name):
    """Kinds compare by identity after a round trip."""
    kind = Kind(name)
    assert copy.deepcopy(kind) is kind
    assert pickle.loads(pickle.dumps(kind)) is kind
