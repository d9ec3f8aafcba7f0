"""Every error has a section of docs/errors.md, every section an error, and the error leads there."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

import hookline as hl
from hookline import errors

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
ERRORS = [
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.HooklineError | errors.HooklineWarning)
]


def test_every_error_has_its_section_and_every_section_its_error() -> None:
    sections = [line.removeprefix("## ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "## "]
    assert sections == sorted(ERRORS, key=str.lower)


def test_an_error_leads_to_its_page_and_its_text_stays_as_it_is() -> None:
    """The address is a note, also of a class of somebody else's that derives from one of ours."""

    class Theirs(errors.OptionError):
        pass

    for name in ERRORS:
        kind = getattr(errors, name)
        address = f"{errors.DOCUMENTATION}/errors.md#{name.lower()}"
        assert errors.help_line(kind) == f"See {address}"
        if issubclass(kind, errors.HooklineError):
            error = kind("what was asked")
            assert str(error) == "what was asked"
            assert traceback.format_exception_only(error)[-1] == f"See {address}\n"
    assert Theirs("x").__notes__ == [errors.help_line(errors.OptionError)]


def test_the_warning_of_a_hook_that_never_fired_leads_to_its_page() -> None:
    """In its text, as warnings have no notes."""
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    handle = hl.attach(model, "1", lambda module, args, output: None)
    model[0](torch.ones(1))
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    model(torch.ones(1))
    with pytest.warns(errors.HookNeverFired, match=errors.help_line(errors.HookNeverFired)):
        handle.remove()
