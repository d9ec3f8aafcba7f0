"""The kinds: names, aliases, what a hook of each is called with, and which options go with which."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hookline as hl
from hookline.sites.kinds import Kind

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
]
TAKES = {
    "with_kwargs": {"forward_pre", "forward"},
    "always_call": {"forward"},
    "observe": {"forward_pre", "forward", "backward_pre", "backward", "full_backward"},
}


def test_the_kinds_are_exactly_these():
    """Nine kinds, in the order they come up in a run."""
    assert [kind.value for kind in Kind] == NAMES


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
    with pytest.raises(hl.KindError, match=r"deprecated.*use on='backward'"):
        Kind.parse(name)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("foward", "forward"), ("forwrd_pre", "forward_pre"), ("bakward", "backward"), ("state_dict", "state_dict_pre")],
)
def test_a_mistyped_kind_is_answered_with_the_nearest(typo, meant):
    """The error names what was probably meant."""
    with pytest.raises(hl.KindError, match=rf"'{typo}'.*Nearest: .*'{meant}'"):
        Kind.parse(typo)


@settings(deadline=None, max_examples=100)
@given(st.one_of(st.none(), st.integers(), st.booleans(), st.floats(), st.binary(), st.text()))
def test_whatever_is_no_kind_is_a_kind_error(value):
    """Nothing but a name or a kind passes, and everything else fails as one error."""
    if value in NAMES or value in ("forward_post", "backward_post"):
        return
    with pytest.raises(hl.KindError, match="Kinds: forward_pre, forward, "):
        Kind.parse(value)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_argument_of_every_hook_is_the_module(name):
    """Every kind hands the module over first, and no argument name comes twice."""
    args = Kind(name).args
    assert args[0] == "module"
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
    ],
)
def test_the_arguments_are_those_of_torch(name, args):
    """A hook written for torch fits."""
    assert Kind(name).args == args


def test_a_load_pre_hook_takes_the_eight_arguments_of_torch():
    """The longest one, in torch's order."""
    assert Kind.LOAD_STATE_DICT_PRE.args[1:] == (
        "state_dict",
        "prefix",
        "local_metadata",
        "strict",
        "missing_keys",
        "unexpected_keys",
        "error_msgs",
    )


@pytest.mark.parametrize("name", NAMES)
def test_state_kinds_are_the_four_of_saving_and_loading_and_edit_nothing(name):
    """A kind either edits by its return value or is about state, never both, never neither."""
    kind = Kind(name)
    assert kind.is_state == ("state_dict" in name)
    assert kind.edits != kind.is_state


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
        kind.check_options(**{option: True})
    else:
        with pytest.raises(hl.OptionError, match=rf"{option}= does not go with on='{name}'; it goes with"):
            kind.check_options(**{option: True})


@pytest.mark.parametrize("name", NAMES)
def test_an_option_that_is_off_is_never_refused(name):
    """Passing the default explicitly is no error."""
    Kind(name).check_options(with_kwargs=False, always_call=False, observe=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_kind_survives_copies_and_pickling_as_itself(name):
    """Kinds compare by identity after a round trip."""
    kind = Kind(name)
    assert copy.deepcopy(kind) is kind
    assert pickle.loads(pickle.dumps(kind)) is kind
