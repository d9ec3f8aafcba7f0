"""Edits, options and failures of hooks in compiled code: as in eager code."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from helpers_compiled import KINDS, Blocks, breaks, compiled, fill, step
from torch import Tensor, nn

import hookline as hl

pytestmark = pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")


def _gradients(model: nn.Module, run: Any, *args: Any) -> list[Tensor]:
    model.zero_grad()
    step(run, *args)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _close(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one, other, strict=True))


# -- edits -------------------------------------------------------------------------------------------------


def _halve(module, args, output):
    return output * 0.5


def _halve_with_site(module, args, output, *, site):
    return output * (0.5 if site.name == "layers.1" else 0.25)


def _halve_input(module, args):
    return (args[0] * 0.5,)


def _halve_input_bare(module, args):
    return args[0] * 0.5


def _halve_with_kwargs(module, args, kwargs):
    return (args[0] * 0.5,), kwargs


def _halve_grad_input(module, grad_input, grad_output):
    return (None if grad_input[0] is None else grad_input[0] * 0.5,)


def _halve_grad_output(module, grad_output):
    return (grad_output[0] * 0.5,)


def _halve_in_place(module, args, output):
    output.mul_(0.5)


EDITS: dict[str, tuple[Any, dict[str, Any]]] = {
    "forward": (_halve, {"on": "forward"}),
    "forward with site": (_halve_with_site, {"on": "forward"}),
    "forward in place": (_halve_in_place, {"on": "forward"}),
    "forward_pre": (_halve_input, {"on": "forward_pre"}),
    "forward_pre, not a tuple": (_halve_input_bare, {"on": "forward_pre"}),
    "forward_pre with_kwargs": (_halve_with_kwargs, {"on": "forward_pre", "with_kwargs": True}),
    "backward": (_halve_grad_input, {"on": "backward"}),
    "backward_pre": (_halve_grad_output, {"on": "backward_pre"}),
}


# Whole, each of them; block by block, one that takes each way into the graph.
_EDITS = [
    *((edit, "torch.compile(model)") for edit in EDITS),
    *((edit, "block.compile()") for edit in ("forward with site", "forward_pre with_kwargs", "backward")),
]


@pytest.mark.parametrize(("edit", "way"), _EDITS)
def test_an_edit_gives_the_gradients_of_eager_code_and_goes_when_removed(edit: str, way: str) -> None:
    """Edits are part of the graph, so autograd sees them."""
    hook, options = EDITS[edit]
    model, x = Blocks(), torch.randn(3, 4)
    with hl.attach(model, "layers.#", hook, **options) as handle:
        expected = _gradients(model, model, x)
        assert handle.report().fired == 2
    run = compiled(model, way=way)
    plain = _gradients(model, run, x)
    with hl.attach(model, "layers.#", hook, **options) as handle:
        assert _close(_gradients(model, run, x), expected)
        assert _close(_gradients(model, run, x), expected)
        assert handle.report().fired == 4
    assert not _close(plain, expected)
    assert all(torch.equal(a, b) for a, b in zip(_gradients(model, run, x), plain, strict=True))
    assert breaks() == 0


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
def test_an_in_place_change_that_would_be_lost_is_an_error(mode: Any) -> None:
    """The hook looks like one that only watches, so it was shown a copy: the error names it and says what to do."""
    model, x = Blocks(1).eval(), torch.randn(3, 4)
    run = compiled(model)
    with mode():
        with (
            hl.attach(model, "layers.0", fill),
            pytest.raises(hl.errors.HookReturnError, match=r"'fill' on 'layers\.0'"),
        ):
            run(x)
        assert torch.equal(run(x), model(x))


def test_arguments_that_do_not_fit_are_an_error_that_names_the_hook() -> None:
    """Of a pre-hook with keyword arguments; in compiled code as in eager code."""
    model = Blocks(1)
    hl.attach(model, "layers.0", lambda module, args, kwargs: args, on="forward_pre", with_kwargs=True, name="mine")
    with pytest.raises(RuntimeError, match=r"'mine' on 'layers\.0' takes kwargs.*got \(Tensor\)"):
        compiled(model)(torch.randn(3, 4))


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_observers_and_edits_of_one_site_keep_their_order(kind: str) -> None:
    """Raw observer, edit, plain hook, edit, observer: each sees what it sees in eager code."""
    model, x, seen = Blocks(1), torch.randn(3, 4), []

    def noting(name):
        def note(module, *shown):
            value = shown[-1][0] if kind == "forward_pre" else shown[-1]
            seen.append((name, value.detach().clone()))

        return note

    def double(module, *shown):
        return (shown[-1][0] * 2,) if kind == "forward_pre" else shown[-1] * 2

    def attach_five() -> hl.HandleSet:
        return hl.HandleSet(
            [
                hl.attach(model, "layers.0", noting("last"), on=kind, observe=True),
                hl.attach(model, "layers.0", double, on=kind),
                hl.attach(model, "layers.0", noting("plain"), on=kind),
                hl.attach(model, "layers.0", double, on=kind),
                hl.attach(model, "layers.0", noting("raw"), on=kind, prepend=True),
            ]
        )

    run = compiled(model)
    with attach_five():
        expected = model(x)
        eager = list(seen)
        seen.clear()
        assert torch.allclose(run(x), expected, atol=1e-6)
        assert [name for name, _ in seen] == [name for name, _ in eager] == ["raw", "plain", "last"]
        assert all(torch.allclose(a, b, atol=1e-6) for (_, a), (_, b) in zip(seen, eager, strict=True))
    values = [value for _, value in eager]
    assert torch.equal(values[1], values[0] * 2)
    assert torch.equal(values[2], values[0] * 4)


# -- coming, going, failing --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_raises_is_heard_and_the_next_call_works(kind: str) -> None:
    """Its own error comes through, from the forward or the backward."""
    model, x, calls = Blocks(1), torch.randn(3, 4), []

    def fail_once(module, *shown):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("of the hook's own")

    run = compiled(model)
    with hl.attach(model, "layers.0", fail_once, on=kind, observe=True):
        with pytest.raises(ValueError, match="of the hook's own"):
            step(run, x)
        step(run, x)
    assert len(calls) == 2
    assert breaks() == 0


@pytest.mark.parametrize("kind", ["backward_pre", "backward"])
def test_gradient_hooks_go_at_once_and_come_with_the_next_call(kind: str) -> None:
    """Removed between forward and backward it is silent; attached there, it does not take part in that call."""
    model, x, fired = Blocks(1), torch.randn(3, 4), []

    def note(module, *shown):
        fired.append(1)

    run = compiled(model)
    with hl.attach(model, "layers.0", note, on=kind, observe=True):
        step(run, x)
        assert len(fired) == 1
        loss = run(x).sum()
    loss.backward()
    assert len(fired) == 1
    with hl.attach(model, "layers.0", lambda module, *shown: None, on=kind, observe=True):
        loss = run(x).sum()
        with hl.attach(model, "layers.0", note, on=kind, observe=True):
            loss.backward()
            assert len(fired) == 1
            step(run, x)
            assert len(fired) == 2
