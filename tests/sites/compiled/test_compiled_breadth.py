"""Hooks in compiled code fire as they do in eager code: as often, in the same order, on the same values."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from helpers_compiled import (
    KINDS,
    WAYS,
    Blocks,
    Seen,
    breaks,
    compiled,
    flat,
    graphs,
    observe_all,
    same_fires,
    same_values,
    step,
)
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils.checkpoint import checkpoint

import hookline as hl

pytestmark = [
    pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired"),
    # torch's own, where what is compiled takes something that is no leaf, with hooks or without.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def _gradients(model: nn.Module, run: Any, *args: Any) -> list[Tensor]:
    model.zero_grad()
    step(run, *args)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _close(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one, other, strict=True))


# -- every way to compile ----------------------------------------------------------------------------------


# Every way after the first call, when there is compiled code to find; before it a way differs in nothing but the one.
_MOMENTS = [
    *((way, True) for way in WAYS),
    *((way, False) for way in ("torch.compile(model)", "block.compile()", "another instance before")),
]


@pytest.mark.parametrize(("way", "late"), _MOMENTS)
def test_hooks_of_all_kinds_fire_as_in_eager_code(way: str, late: bool) -> None:
    """The same moments and values, in one graph each, without a break; twelve times on and off compile nothing."""
    model, x = Blocks(), torch.randn(3, 4)
    eager: list[Seen] = []
    with observe_all(model, eager):
        step(model, x), step(model, x)
    run = compiled(model, way=way)
    if late:
        step(run, x), step(run, x)
    seen: list[Seen] = []
    with observe_all(model, seen):
        step(run, x), step(run, x)
    assert same_fires(seen, eager)
    assert same_values(seen, eager)
    assert breaks() == 0
    step(run, x)
    assert len(seen) == len(eager)
    before = graphs()
    for _ in range(12):
        with observe_all(model, seen):
            step(run, x)
        step(run, x)
    assert graphs() == before
    assert len(seen) == 7 * len(eager)


@pytest.mark.parametrize("kind", KINDS)
def test_twelve_blocks_share_graphs(kind: str) -> None:
    """Compiled block by block, a hook on each takes one graph for all, and one more where input needs no gradient."""
    model, x, seen = Blocks(depth=12), torch.randn(3, 4), []
    run = compiled(model, way="block.compile()")
    with observe_all(model, seen, "layers.#", (kind,)):
        step(run, x)
    assert [s.name for s in seen] == [f"layers.{i}" for i in (range(12) if "forward" in kind else range(11, -1, -1))]
    assert graphs() <= 2
    assert breaks() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_runs_any_python_fires_on_every_call(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Appends, counts, prints, reads numbers off the tensors: nothing that the compiler has to understand."""
    model, x, kept = Blocks(1), torch.randn(3, 4), []
    counts: collections.Counter[str] = collections.Counter()

    def work(module, *shown):
        kept.append(float(next(t for t in flat(shown) if t is not None).norm().item()))
        counts[type(module).__name__] += 1
        with contextlib.suppress(ZeroDivisionError):
            1 / 0
        print(f"{len(kept)}th")

    run = compiled(model)
    step(run, x)
    with hl.attach(model, "layers.0", work, on=kind, observe=True) as handle:
        for _ in range(5):
            step(run, x)
        assert handle.report().fired == 5
    assert len(kept) == counts["Block"] == 5
    assert len(set(kept)) == 1
    assert capsys.readouterr().out.split() == ["1th", "2th", "3th", "4th", "5th"]
    assert breaks() == 0


@pytest.mark.parametrize("target", ["child", "wrapper", "list"])
def test_late_attachment_through_a_part_or_the_wrapper_fires(target: str) -> None:
    """Attaching to a child of what was compiled, or to what torch.compile gave back, is as good; names are clean."""
    model, x, names = Blocks(), torch.randn(3, 4), []

    def note(module, args, output, *, site):
        names.append(site.name)

    run = compiled(model)
    run(x)
    if target == "child":
        handle = hl.attach(model.layers[1].up, note, observe=True)
    elif target == "wrapper":
        handle = hl.attach(run, "layers.1.up", note, observe=True)
    else:
        handle = hl.attach(model, ["layers.1.up"], note, observe=True)
    with handle:
        run(x)
    assert names == ["" if target == "child" else "layers.1.up"]


def test_a_model_of_torchs_own_classes_is_refreshed_too() -> None:
    """Linear and ReLU in a Sequential, and a free function around one Linear."""
    model, x, fired = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4), []
    alone = nn.Linear(4, 4)
    run, function = compiled(model), torch.compile(lambda x: alone(x).relu(), backend="aot_eager", fullgraph=True)
    run(x), function(x)

    def note(module, args, output):
        fired.append(type(module).__name__)

    with hl.attach(model, "*", note, observe=True), hl.attach(alone, note, observe=True):
        run(x), function(x)
    assert fired == ["Linear", "ReLU", "Sequential", "Linear"]


# -- real models -------------------------------------------------------------------------------------------

# transformers leaves masks out in eager code alone where it can, which attention in plain operators keeps it from.
_ANY: dict[str, Any] = {"attn_implementation": "eager"}
_TEXT: dict[str, Any] = {"vocab_size": 31, "bos_token_id": 0, "eos_token_id": 0, **_ANY}


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=8, **_TEXT))


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        hidden_size=16,
        intermediate_size=24,
        **_TEXT,
    )
    return transformers.LlamaForCausalLM(config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=1, num_attention_heads=2, hidden_size=16, intermediate_size=24, vocab_size=31, **_ANY
    )
    return transformers.BertForMaskedLM(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_size=16,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        **_ANY,
    )
    return transformers.ViTForImageClassification(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        num_layers=1, num_heads=2, d_model=16, d_ff=24, d_kv=8, vocab_size=31, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("make", [_gpt2, _llama, _bert, _vit, _t5], ids=lambda make: make.__name__[1:])
def test_transformers_report_every_module_as_in_eager_code(make: Any) -> None:
    """Hooks of all four kinds on every module: the same moments, and the same values within rounding."""
    model = make().eval()
    ids = torch.randint(0, 31, (2, 6))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if make is _vit:
        batch = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    if make in (_gpt2, _llama):
        model.loss_type = "ForCausalLM"  # transformers warns otherwise, which breaks the graph
    if make in (_gpt2, _llama, _t5):
        batch["use_cache"] = False

    def train(run: Any) -> None:
        model.zero_grad()
        run(**batch).loss.backward()

    eager: list[Seen] = []
    with observe_all(model, eager):
        train(model), train(model)
    run = compiled(model)
    seen: list[Seen] = []
    with observe_all(model, seen):
        train(run), train(run)
    assert collections.Counter(s.where for s in seen) == collections.Counter(s.where for s in eager)
    forwards = [[s for s in log if s.kind.startswith("forward")] for log in (seen, eager)]
    assert same_fires(*forwards)
    by_place = {s.where: s.values for s in eager}
    for fired in seen:
        for ours, theirs in zip(_tensors(fired.values), _tensors(by_place[fired.where]), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    assert (graphs(), breaks()) == (1, 0)


def _tensors(values: list[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


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


def _fill(module, args, output):
    output[:] = 0


def test_an_in_place_change_that_would_be_lost_is_an_error() -> None:
    """The hook looks like one that only watches, so it was shown a copy: the error names it and says what to do."""
    model, x = Blocks(1), torch.randn(3, 4)
    run = compiled(model)
    with hl.attach(model, "layers.0", _fill), pytest.raises(hl.errors.HookReturnError, match=r"'_fill' on 'layers\.0'"):
        run(x)
    assert run(x).shape == (3, 4)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_an_edit_that_cannot_be_traced_is_the_compilers_error_naming_the_site() -> None:
    """The hook's name and its module are in the text."""

    def edit(module, args, output):
        threading.current_thread()
        return output * 2

    model, x = Blocks(1), torch.randn(3, 4)
    run = compiled(model)
    with (
        hl.attach(model, "layers.0.up", edit, name="through the thread"),
        pytest.raises(torch._dynamo.exc.Unsupported) as error,
    ):
        run(x)
    assert "through the thread" in str(error.value)
    assert "layers.0.up" in str(error.value)
    assert run(x).shape == (3, 4)


def _append_shape(module, args, output):
    SHAPES.append(tuple(output.shape))


SHAPES: list[tuple[int, ...]] = []


def test_plain_hooks_that_return_nothing_need_not_be_traced() -> None:
    """A hook without observe=True that only looks on is left out of the graph, wherever it appends to."""
    model, x = Blocks(), torch.randn(3, 4)
    SHAPES.clear()
    run = compiled(model)
    run(x)
    with hl.attach(model, "layers.#", _append_shape):
        run(x), run(x)
    assert SHAPES == [(3, 4)] * 4
    assert breaks() == 0


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
                hl.attach(model, "layers.0", noting("raw"), on=kind, observe=True, sees="raw"),
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


# -- options -----------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Takes what is not a tensor, by place and by name."""

    def forward(self, x: Tensor, times: int, *, by: float = 0.5, how: str = "up", also: Any = None) -> Tensor:
        return x * times * by


class Scaling(nn.Module):
    """Calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()

    def forward(self, x: Tensor, times: int, by: float, also: Any = None) -> Tensor:
        return self.scaled(x, times, by=by, how="down", also=also)


def test_keyword_arguments_and_numbers_come_as_they_are() -> None:
    """Ints and floats that change from call to call, strings, None and a nested list with a tensor in it."""
    model, x, seen = Scaling(), torch.ones(2), []

    def note(module, args, kwargs, output):
        seen.append((args[1], kwargs, output))

    run = compiled(model)
    with hl.attach(model, "scaled", note, observe=True, with_kwargs=True):
        for times in (2, 3, 4):
            run(x, times, times / 4, [None, {"a": (x, True)}])
    for times, (number, kwargs, output) in zip((2, 3, 4), seen, strict=True):
        assert number == times
        assert {key: kwargs[key] for key in ("by", "how")} == {"by": times / 4, "how": "down"}
        assert kwargs["also"][0] is None
        assert kwargs["also"][1]["a"][1] is True
        assert torch.equal(kwargs["also"][1]["a"][0], x)
        assert torch.equal(output, x * times * times / 4)


def test_options_always_call_and_profile() -> None:
    """An always_call hook fires once per call; profile=True has a cost to show."""
    model, x, fired = Blocks(1), torch.randn(3, 4), []

    def note(module, args, output):
        fired.append(output is None)

    run = compiled(model)
    with hl.attach(model, "layers.0", note, observe=True, always_call=True, profile=True) as handle:
        run(x), run(x)
        assert handle.report().fired == 2
        assert handle.report().cost_us > 0
    assert fired == [False, False]
    run(x)
    assert breaks() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_scope_is_read_when_the_code_runs(kind: str) -> None:
    """scope='context': the calls of another thread are none of the hook's business, compiled or not."""
    model, x, fired = Blocks(1), torch.randn(3, 4), []

    def note(module, *shown):
        fired.append(threading.get_ident())

    run = compiled(model)
    with hl.attach(model, "layers.0", note, on=kind, observe=True, scope="context"):
        thread = threading.Thread(target=step, args=(run, x))
        thread.start()
        thread.join()
        assert fired == []
        step(run, x)
    assert len(fired) == 1


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_may_take_itself_off_or_put_another_on(kind: str) -> None:
    """As in eager code: it has run for the last time; the new one begins with the next call."""
    logs = []
    for compiles in (False, True):
        model, x, log = Blocks(1), torch.randn(3, 4), []
        handles: dict[str, hl.HookHandle] = {}

        def once(module, *shown, log=log, handles=handles):
            log.append("once")
            handles["once"].remove()

        def other(module, *shown, log=log):
            log.append("other")

        def adding(module, *shown, log=log, handles=handles, model=model, other=other):
            log.append("adding")
            if "other" not in handles:
                handles["other"] = hl.attach(model, "layers.0", other, on=kind, observe=True)

        run = compiled(model) if compiles else model
        handles["once"] = hl.attach(model, "layers.0", once, on=kind, observe=True)
        handles["adding"] = hl.attach(model, "layers.0", adding, on=kind, observe=True)
        for _ in range(3):
            step(run, x)
            log.append("|")
        hl.HandleSet(handles.values()).remove()
        logs.append(log)
    assert logs[0] == logs[1] == ["once", "adding", "|", "adding", "other", "|", "adding", "other", "|"]


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


def test_an_error_of_the_model_leaves_the_next_call_in_order() -> None:
    """A wrong shape raises while the call is compiled or run; the following call counts from 0 again."""
    model, seen = Blocks(), []
    run = compiled(model)
    with observe_all(model, seen):
        step(run, torch.randn(3, 4))
        with pytest.raises((RuntimeError, torch._dynamo.exc.TorchDynamoException)):
            run(torch.randn(3, 5))
        del seen[:]
        step(run, torch.randn(3, 4))
    assert len(seen) == 4 * 9
    assert {s.call for s in seen} == {0}


# -- calls -------------------------------------------------------------------------------------------------


class Reusing(nn.Module):
    """Calls one module three times, twice with the very same input, and knows it by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.alias = self.shared

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x) + self.alias(x) + self.shared(self.shared(x).relu())


def test_a_module_called_several_times_has_its_calls_numbered() -> None:
    """Also where two calls are the same to the compiler, which would run them once."""
    model, x = Reusing(), torch.randn(3, 4)
    eager: list[Seen] = []
    with observe_all(model, eager):
        step(model, x), step(model, x)
    seen: list[Seen] = []
    run = compiled(model)
    with observe_all(model, seen):
        step(run, x), step(run, x)
    for kind in KINDS:
        assert [s.where for s in seen if s.kind == kind] == [s.where for s in eager if s.kind == kind]
    assert [s.call for s in seen if s.kind == "forward" and s.name] == [0, 1, 2, 3] * 2
    assert same_values(sorted(seen, key=lambda s: s.where), sorted(eager, key=lambda s: s.where))
    assert (graphs(), breaks()) == (1, 0)


class Pair(NamedTuple):
    """What a module may take or give."""

    left: Tensor
    right: Tensor


@dataclass
class Parcel:
    """The same, as a dataclass."""

    value: Tensor
    label: str


class Giving(nn.Module):
    """Takes and gives structures of one make."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make = make

    def forward(self, given: Any) -> Any:
        x = next(value for value in flat_traced(given))
        return self.make(self.linear(x))


def flat_traced(value: Any) -> list[Tensor]:
    """The tensors in what `MAKES` make."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Parcel):
        return [value.value]
    if isinstance(value, transformers.modeling_outputs.BaseModelOutput):
        return [value.last_hidden_state]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in flat_traced(item)]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in flat_traced(item)]
    return []


class Chain(nn.Module):
    """Two of those in a row."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.one, self.two = Giving(make), Giving(make)

    def forward(self, x: Tensor) -> Tensor:
        return flat_traced(self.two(self.one(x)))[0]


MAKES: dict[str, Any] = {
    "tuple": lambda x: (x, None, 3),
    "list": lambda x: [x, x * 2],
    "dict": lambda x: {"x": x, "n": 1, "s": "text", "none": None},
    "namedtuple": lambda x: Pair(x, x * 2),
    "ModelOutput": lambda x: transformers.modeling_outputs.BaseModelOutput(last_hidden_state=x, hidden_states=(x,)),
    "dataclass": lambda x: Parcel(x, "label"),
    "nested": lambda x: {"a": [(x, {"b": x * 2})], "c": 0.5},
}


@pytest.mark.parametrize("make", MAKES)
def test_structures_come_as_they_do_in_eager_code(make: str) -> None:
    """The same classes around the same values, forward and gradient."""
    model, x = Chain(MAKES[make]), torch.randn(3, 4)
    kinds = ("forward_pre", "forward") if make == "dataclass" else KINDS
    logs = []
    for run in (model, compiled(model)):
        seen: list[Seen] = []
        classes: list[type] = []

        def note(module, args, output, classes=classes):
            classes.append(type(output))

        with observe_all(model, seen, kinds=kinds), hl.attach(model, "one", note, observe=True):
            step(run, x)
        logs.append((seen, classes))
    (eager, expected), (seen, classes) = logs
    assert same_fires(seen, eager)
    for ours, theirs in zip(seen, eager, strict=True):
        for a, b in zip(_tensors(ours.values), _tensors(theirs.values), strict=True):
            torch.testing.assert_close(a, b)
    assert classes == expected


def test_a_changing_batch_size_compiles_no_more_than_without_hooks() -> None:
    """torch makes the size dynamic at the second one; so it does with hooks."""
    counted = []
    for hooked in (False, True):
        torch._dynamo.reset()
        before = graphs()
        model, seen = Blocks(), []
        run = compiled(model)
        with observe_all(model, seen) if hooked else contextlib.nullcontext():
            for size in (2, 3, 5, 7, 11):
                step(run, torch.randn(size, 4))
        counted.append(graphs() - before)
        if hooked:
            for kind in KINDS:
                sizes = [s.values[0].shape[0] for s in seen if s.name == "layers.1" and s.kind == kind]
                assert sizes == [2, 3, 5, 7, 11]
    assert counted == [2, 2]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes_of_torch_are_the_same_for_hooks(mode: Any) -> None:
    """no_grad, inference_mode, autocast: the same firings and dtypes; gradient hooks where there are gradients."""
    model, x = Blocks(), torch.randn(3, 4)
    logs = []
    for run in (model, compiled(model)):
        seen: list[Seen] = []
        with observe_all(model, seen):
            with mode():
                loss = run(x).float().sum()
            if loss.requires_grad:
                loss.backward()
        logs.append(seen)
    assert same_fires(*logs)
    for one, other in zip(*logs, strict=True):
        assert [getattr(v, "dtype", v) for v in one.values] == [getattr(v, "dtype", v) for v in other.values]


def test_a_plain_hook_that_only_looks_fires_in_inference_mode() -> None:
    """Tensors of inference mode do not tell whether they were changed; the hook is shown a copy that does."""
    model, x = Blocks(1).eval(), torch.randn(3, 4)
    sums: list[float] = []

    def looks(module: nn.Module, args: Any, output: Tensor) -> None:
        sums.append(float(output.sum()))

    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.inference_mode(), hl.attach(model, "layers.0", looks) as handle:
        expected = model(x)
        for given in (x, x.clone()):  # the second is itself one of inference mode
            assert torch.equal(run(given), expected)
    assert handle.report().fired == len(sums) == 3
    assert len(set(sums)) == 1


def test_an_in_place_change_that_would_be_lost_is_an_error_in_inference_mode_too() -> None:
    """In the same words as outside of it; without the hook the next call is as ever."""
    model, x = Blocks(1).eval(), torch.randn(3, 4)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        with (
            hl.attach(model, "layers.0", _fill),
            pytest.raises(hl.errors.HookReturnError, match=r"'_fill' on 'layers\.0'"),
        ):
            run(x)
        assert torch.equal(run(x), model(x))


def test_training_and_evaluation_mode_have_a_graph_each() -> None:
    """Switching to and fro compiles once per mode, and hooks fire in both."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.ones(3, 4)
    seen: list[Seen] = []
    run = compiled(model)
    with observe_all(model, seen):
        for _ in range(3):
            model.train()
            step(run, x)
            model.eval()
            step(run, x)
    assert graphs() == 2
    assert len(seen) == 6 * 4 * 3
    assert {s.step for s in seen} == set(range(6))


class Recomputing(Blocks):
    """Keeps no activations of its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_activation_checkpointing_counts_once() -> None:
    """The recomputation in the backward graph fires nothing; gradient hooks know their step and call."""
    model, x = Recomputing(), torch.randn(3, 4)
    eager: list[Seen] = []
    with observe_all(model, eager):
        step(model, x), step(model, x)
    first = [s for s in eager if s.kind.startswith("forward")]
    seen: list[Seen] = []
    run = compiled(model)
    with observe_all(model, seen):
        step(run, x), step(run, x)
    forwards = [s for s in seen if s.kind.startswith("forward")]
    assert len(forwards) == 2 * 2 * 9
    assert {s.where for s in forwards} == {s.where for s in first}
    ours, theirs = ([s for s in log if s.kind.startswith("backward")] for log in (seen, eager))
    assert collections.Counter(s.where for s in ours) == collections.Counter(s.where for s in theirs)
    assert breaks() == 0


def test_several_backward_passes_and_micro_batches() -> None:
    """retain_graph, and two forwards before two backwards: each gradient is told the step of its own forward."""
    model, x = Blocks(1), torch.randn(3, 4)
    logs = []
    for run in (model, compiled(model)):
        seen: list[Seen] = []
        with observe_all(model, seen, "layers.0"):
            loss = run(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            first, second = run(x).sum(), run(x * 2).sum()
            first.backward()
            second.backward()
        logs.append(seen)
    eager, seen = logs
    assert same_fires(seen, eager)
    assert same_values(seen, eager)
    assert [s.step for s in seen if s.kind == "backward"] == [0, 0, 1, 2]


class Cube(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


class Cubing(nn.Module):
    """Uses it between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(Cube.apply(self.one(x)))


class Printing(Blocks):
    """Cannot be compiled in one piece."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


class PrintingInside(nn.Module):
    """Breaks in the middle of a hooked module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Printing(1), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces an autograd.Function
@pytest.mark.parametrize(
    ("make", "backend"),
    [
        *((make, "aot_eager") for make in (Cubing, Printing, PrintingInside)),
        (Blocks, "eager"),
        (PrintingInside, "eager"),
    ],
)
def test_custom_functions_and_graph_breaks_change_nothing(make: Any, backend: str) -> None:
    """The same firings and values, whatever the backend, and where the compiler had to stop in between."""
    model, x = make(), torch.randn(3, 4)
    logs = []
    for run in (model, compiled(model, backend=backend, fullgraph=False)):
        seen: list[Seen] = []
        with observe_all(model, seen):
            step(run, x), step(run, x)
        logs.append(seen)
    assert same_fires(*logs)
    assert same_values(*logs)
    assert (graphs() > 1) == (make in (Printing, PrintingInside))


# -- beside other tools ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_has_nothing_of_ours_in_it(strict: bool) -> None:
    """It runs where there is no hookline, and gives the same."""
    model, x, seen = Blocks(), torch.randn(3, 4), []
    expected = model(x)
    with observe_all(model, seen):
        program = torch.export.export(model, (x,), strict=strict)
    assert "hookline" not in str(program.graph)
    assert torch.allclose(program.module()(x), expected, atol=1e-6)


def test_transforms_of_torch_func_inside_compiled_code() -> None:
    """grad of functional_call gives the same with hooks, which fire as often as in eager code."""
    model, x = Blocks(1), torch.randn(3, 4)
    parameters = dict(model.named_parameters())

    def gradients(parameters: Any, x: Tensor) -> Any:
        return grad(lambda parameters: functional_call(model, parameters, (x,)).sum())(parameters)

    expected = gradients(parameters, x)
    run = torch.compile(gradients, backend="aot_eager", fullgraph=True)
    eager: list[Seen] = []
    with observe_all(model, eager):
        gradients(parameters, x)
    seen: list[Seen] = []
    with observe_all(model, seen):
        result = run(parameters, x)
    assert all(torch.allclose(result[name], expected[name], atol=1e-6) for name in expected)
    assert collections.Counter(s.where for s in seen) == collections.Counter(s.where for s in eager)


def test_a_copy_of_a_hooked_compiled_model_has_no_hooks() -> None:
    """deepcopy while hooked: the copy compiles and runs, silently; the first still reports."""
    model, x, seen = Blocks(), torch.randn(3, 4), []
    run = compiled(model)
    with observe_all(model, seen):
        step(run, x)
        twin = copy.deepcopy(model)
        count = len(seen)
        copied = compiled(twin)
        assert torch.allclose(copied(x), run(x), atol=1e-6)
        step(copied, x)
        assert len(seen) == count + 2 * 9
        step(run, x)
        assert len(seen) == 2 * count + 2 * 9
    assert breaks() == 0


def test_two_threads_on_one_compiled_model_count_apart() -> None:
    """Each sees its own values, and its calls are numbered by its own forwards."""
    model, seen = Blocks(), []

    def note(module, args, output, *, site):
        seen.append((threading.get_ident(), site.call, float(args[0][0, 0])))

    run = compiled(model)
    with hl.attach(model, "", note, observe=True):
        run(torch.zeros(3, 4))
        seen.clear()
        barrier = threading.Barrier(2)

        def work(value: float) -> None:
            barrier.wait()
            for _ in range(20):
                run(torch.full((3, 4), value))

        threads = [threading.Thread(target=work, args=(float(i),)) for i in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen) == 40
    by_thread = {ident: {value for other, _, value in seen if other == ident} for ident, _, _ in seen}
    assert sorted(map(tuple, by_thread.values())) == [(1.0,), (2.0,)]
    assert {call for _, call, _ in seen} == {0}


def test_a_compiled_training_step_with_the_backward_in_it() -> None:
    """torch.compile of a whole step, where the compiler stops at backward()."""
    model, x = Blocks(), torch.randn(3, 4)

    def whole_step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    eager: list[Seen] = []
    with observe_all(model, eager):
        whole_step(x), whole_step(x)
    seen: list[Seen] = []
    run = torch.compile(whole_step, backend="aot_eager")
    with observe_all(model, seen):
        run(x), run(x)
    assert same_fires(seen, eager)
    assert same_values(seen, eager)


class _Watcher:
    """Hooks that are not plain functions."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def __call__(self, module, args, output):
        self.seen.append((float(args[0].detach().sum()), float(output.detach().sum())))

    def method(self, module, args, output=None, extra=3):
        self(module, args, output)

    def through_a_closure(self, module, args, output):
        (lambda: self(module, args, output))()

    def anything(self, *shown):
        self(*shown)


def test_hooks_of_every_make_are_shown_everything_they_look_at() -> None:
    """Instances, methods, partials, closures: what a hook does not read is not kept for it, what it reads is."""
    model, x, watcher = Blocks(1), torch.randn(3, 4), _Watcher()
    run = compiled(model)
    makes = [
        watcher,
        watcher.method,
        watcher.through_a_closure,
        watcher.anything,
        functools.partial(watcher.method, extra=4),
    ]
    for hook in makes:
        with hl.attach(model, "layers.0", hook, observe=True):
            run(x)
    expected = float(x.sum()), float(model(x).detach().sum())
    assert len(watcher.seen) == len(makes)
    for shown in watcher.seen:
        assert shown == pytest.approx(expected, abs=1e-4)


def test_an_edit_reads_what_it_closes_over_at_each_call() -> None:
    """A tensor that changes between calls, twelve times: the same graph, each time the new value."""
    model, x, vector = Blocks(1), torch.randn(3, 4), torch.zeros(4)

    def shift(module, args, output):
        return output + vector

    run = compiled(model)
    with torch.no_grad():
        plain = model(x)
        with hl.attach(model, "layers.0", shift):
            for value in range(12):
                vector.fill_(value)
                assert torch.allclose(run(x), plain + value, atol=1e-5)
    assert graphs() == 1
