"""Test the hooks of SGLang's model runners with stand-ins that have the attributes of its objects.

``make test-sglang`` tests the same against SGLang's own modules.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_sglang import seeded_decoder

import hookline as hl
from hookline.engines.sglang import register, runner_hooks
from hookline.engines.sglang.runner_hooks import SglangHooks
from hookline.errors import ConfigError, OptionError
from hookline.factories.served_batch import tokens_of_batch
from hookline.observe.tokens import current_tokens

LAYERS = ["model.layers.#"]
STATS = {"name": "stats", "target_modules": LAYERS, "hook_factory": "hookline.factories:activation_stats"}


class Mode:
    """A stand-in for SGLang's ``ForwardMode``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, asked: str) -> Any:
        return lambda: asked == f"is_{self._name}"


def batch(mode: str, names: list[str], lengths: list[int], prefixes: list[int] | None = None, **more: Any) -> Any:
    """A stand-in for a ``ForwardBatch``."""
    total = sum(lengths)
    extend = {} if mode == "decode" else {"extend_seq_lens_cpu": lengths, "extend_prefix_lens_cpu": prefixes}
    return SimpleNamespace(
        forward_mode=Mode(mode), rids=names, input_ids=torch.arange(total) % 32, positions=torch.arange(total),
        seq_lens=torch.tensor(lengths), **{**extend, **more},
    )  # fmt: skip


class Runner:
    """A stand-in for a ``ModelRunner`` whose model is loaded."""

    gpu_id = 3
    is_draft_worker = False

    def __init__(self) -> None:
        self.model = seeded_decoder()

    def run(self, given: Any) -> Any:
        def forward(runner: Any, each: Any) -> Any:
            with torch.no_grad():
                return runner.model(each.input_ids, each.positions, each)

        return runner_hooks._around_forward(forward, self, given)


@pytest.fixture
def attached() -> Iterator[Any]:
    """Attach specs to the model of a new runner; take everything off at the end."""
    made: list[Any] = []

    def attach(*specs: dict[str, Any], runner: Any = None, **options: Any) -> tuple[Any, SglangHooks | None]:
        runner = runner or Runner()
        runner_hooks._attach(runner, specs, **options)
        made.append(runner)
        return runner, runner_hooks.hooks_of_runner(runner)

    yield attach
    for runner in made:
        hooks = runner_hooks.hooks_of_runner(runner)
        if hooks is not None:
            hooks.close()
        hl.assert_no_hooks(runner.model, foreign=True)


# -- rows ------------------------------------------------------------------------------------------------------


def test_a_batch_says_whose_rows_are_whose() -> None:
    """Decoding, prompts, both at once, and tokens that speculation checks; the stage of each request."""
    found = tokens_of_batch(batch("decode", ["a", "b"], [1, 1]))
    assert found is not None
    assert (found.lengths, found.requests, found.phase) == ((1, 1), ("a", "b"), "decode")
    prompts = tokens_of_batch(batch("extend", ["a", "b"], [3, 2], [0, 4]))
    assert prompts is not None
    assert (prompts.lengths, prompts.phase, prompts.phases) == ((3, 2), "prefill", ("prefill", "prefill"))
    mixed = tokens_of_batch(batch("mixed", ["a", "b"], [3, 1], [0, 9]))
    assert mixed is not None
    assert (mixed.phase, mixed.phases) == ("mixed", ("prefill", "decode"))
    checked = batch("target_verify", ["a", "b"], [2, 2], extend_seq_lens_cpu=None)
    verified = tokens_of_batch(checked)
    assert verified is not None
    assert (verified.lengths, verified.phase) == ((2, 2), "decode")


def test_padding_is_left_out_and_an_unknown_batch_has_no_table() -> None:
    """Rows behind the last token are nobody's; an idle batch, two halves and a batch without names say nothing."""
    padded = batch("extend", ["a"], [2], [0])
    padded.input_ids, padded.positions = torch.arange(8), torch.arange(8)
    found = tokens_of_batch(padded)
    assert found is not None
    assert found.ids is not None
    assert found.ids.tolist() == [0, 1]
    assert tokens_of_batch(batch("idle", ["a"], [1])) is None
    assert tokens_of_batch(batch("decode", [], [])) is None
    assert tokens_of_batch(batch("decode", ["a"], [1], tbo_split_seq_index=1)) is None
    assert tokens_of_batch(batch("extend", ["a"], [2], extend_seq_lens_cpu=None)) is None


def test_positions_are_known_by_lengths_where_a_device_has_them(attached: Any) -> None:
    """Of prompts and single tokens; not of the tokens that speculation checks, which are a tree."""
    found: list[Any] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        table = current_tokens()
        assert table is not None
        found.append(table.firsts)

    runner, _ = attached({"target_modules": ["model.layers.0"], "hook_factory": lambda config: keep})
    for mode, lengths, prefixes in (
        ("extend", [3, 2], [0, 4]),
        ("decode", [1, 1], None),
        ("target_verify", [2, 2], None),
    ):
        given = batch(mode, ["a", "b"], lengths, prefixes, seq_lens_cpu=torch.tensor([5, 8]))
        given.positions = given.positions.to("meta")
        if mode == "target_verify":
            given.extend_seq_lens_cpu = None
        runner.run(given)
    assert found == [(0, 4), (4, 7), (None, None)]


# -- hooks -----------------------------------------------------------------------------------------------------


def _steps() -> list[Any]:
    return [batch("extend", ["a", "b"], [3, 2], [0, 0]), batch("decode", ["a", "b"], [1, 1])]


def test_observers_fire_in_every_forward_and_leave_the_answers_as_they_are(attached: Any) -> None:
    """Bit for bit; the negative control, a hook that steers, changes them."""
    plain = [Runner().run(step) for step in _steps()]
    runner, hooks = attached(STATS)
    watched = [runner.run(step) for step in _steps()]
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    assert [live.fired for live in hooks.live.list()] == [4]  # two layers, two forwards
    assert any(name.endswith("/mean") for name in hooks.live.metrics()["h1"])
    steered, _ = attached(_steer())
    assert not torch.equal(steered.run(_steps()[0]), plain[0])


def _steer(**config: Any) -> dict[str, Any]:
    given = {"vector": [1.0] * 8, **config}
    return {"target_modules": ["model.layers.0"], "hook_factory": "hookline.factories:steer", "config": given}


@pytest.mark.parametrize("place", [0, 1])
def test_one_request_of_a_batch_is_steered_and_the_other_is_not(attached: Any, place: int) -> None:
    """Its rows change and no others, in prompts and in answers."""
    runner, _ = attached(_steer(requests=["b"]))
    step = _steps()[place]
    plain, steered = Runner().run(step), runner.run(step)
    own = slice(3, 5) if place == 0 else slice(1, 2)
    others = slice(0, own.start)
    assert torch.equal(plain[others], steered[others])
    assert not torch.isclose(plain[own], steered[own]).all(dim=-1).any()


def test_a_hook_that_raises_is_switched_off_and_the_engine_goes_on(attached: Any, caplog: Any) -> None:
    """The log has the error; the other hook still fires, and answers are right."""
    spec = {"name": "bad", "target_modules": LAYERS, "hook_factory": f"{__name__}:breaks"}
    runner, hooks = attached(spec, STATS)
    found = [runner.run(step) for step in _steps()]
    assert all(torch.equal(one, Runner().run(step)) for one, step in zip(found, _steps(), strict=True))
    bad, stats = hooks.live.list()
    assert (bad.off, bad.errors, stats.fired) == (True, 1, 4)
    assert "stock is empty" in caplog.text
    assert hooks.is_active
    hooks.live.remove(stats.id)
    assert not hooks.is_active  # the one that is off needs no step without graphs


def breaks(config: dict[str, Any]) -> Any:
    """A factory whose hook raises."""

    def hook(module: Any, inputs: Any, output: Any) -> None:
        raise RuntimeError("stock is empty")

    return hook


def test_a_spec_that_cannot_be_attached_is_told_and_the_others_are_on(attached: Any, caplog: Any) -> None:
    """No such factory; a module that this rank does not have; then one that works."""
    missing = {"name": "lost", "target_modules": LAYERS, "hook_factory": "hookline.factories:no_such"}
    elsewhere = {**STATS, "name": "elsewhere", "target_modules": ["model.layers.77"]}
    _, hooks = attached(missing, elsewhere, STATS)
    assert [live.name for live in hooks.live.list()] == ["stats"]
    assert "'lost' is not attached" in caplog.text
    assert "model.layers.77" in caplog.text


def test_a_request_gets_hooks_and_hidden_states_at_run_time(attached: Any) -> None:
    """Asked for by its rid before it begins: its rows alone, the sum of the pair that a layer gives, positions."""
    runner, hooks = attached()
    plain = Runner()
    steps = [batch("extend", ["a", "b"], [3, 2], [0, 0]), batch("decode", ["a", "b"], [1, 1])]
    steps[0].positions = torch.tensor([0, 1, 2, 0, 1])
    steps[1].positions = torch.tensor([3, 2])
    assert not hooks.is_active
    hooks.ask("b", {"hidden_states": {"layers": ["model.layers.1"]}, "hooks": [_steer()]})
    assert hooks.is_active
    expected = []
    for step in steps:
        found, without = runner.run(step), plain.run(step)
        own = slice(3, 5) if len(found) == 5 else slice(1, 2)
        assert torch.equal(found[: own.start], without[: own.start])
        assert not torch.isclose(found[own], without[own]).all(dim=-1).any()
        expected.append(found[own])
    (entry,) = hooks.take("b")
    layer = entry["states"]["model.layers.1"]
    states = torch.frombuffer(bytearray(layer["data"]), dtype=torch.float32).reshape(layer["shape"])
    assert layer["positions"] == [0, 1, 2]
    with torch.no_grad():
        logits = torch.nn.functional.linear(states, runner.model.lm_head.weight)
    torch.testing.assert_close(logits, torch.cat(expected))
    assert entry["hooks"][0]["rows"] == 3
    assert not hooks.is_active
    with pytest.raises(OptionError, match="has no"):
        hooks.ask("c", {"hiden_states": {}})


# -- graphs ----------------------------------------------------------------------------------------------------


def test_forwards_run_eagerly_while_a_hook_is_on(attached: Any) -> None:
    """A graph runner is answered for with False, and by itself again once the last hook is off."""
    runner, hooks = attached(STATS)
    graphs = SimpleNamespace(model_runner=runner)
    assert runner_hooks._unless_hooked(True, graphs, object()) is False
    runner_hooks._around_capture(lambda model_runner: runner.run(_steps()[0]), model_runner=runner)
    assert hooks.live.list()[0].fired == 0  # a capture records no hook
    runner.run(_steps()[0])
    assert hooks.live.list()[0].fired == 2
    hooks.live.remove("h1")
    assert runner_hooks._unless_hooked(True, graphs, object()) is None
    assert runner_hooks._unless_hooked(True, SimpleNamespace(model_runner=Runner()), object()) is None
    assert runner_hooks._unless_hooked(True, SimpleNamespace(), object()) is None


# -- the plugin ------------------------------------------------------------------------------------------------


def test_the_plugin_does_nothing_unless_it_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the variable it needs no sglang; with it, mistakes are raised, for SGLang to log."""
    monkeypatch.delenv("HOOKLINE_SGLANG_HOOKS", raising=False)
    register()
    monkeypatch.setenv("HOOKLINE_SGLANG_HOOKS", str(tmp_path / "nowhere.json"))
    with pytest.raises(ConfigError, match="nowhere"):
        register()
    file = tmp_path / "hooks.json"
    file.write_text(json.dumps([STATS]))
    monkeypatch.setenv("HOOKLINE_SGLANG_HOOKS", str(file))
    monkeypatch.setitem(sys.modules, "sglang", None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match="sglang"):
        register()


def test_a_hook_that_does_not_fire_is_named_in_the_log(attached: Any, caplog: Any) -> None:
    """Once, after a few forwards, without a report."""
    head = {**STATS, "name": "head", "target_modules": ["lm_head"]}  # read and never called
    runner, _ = attached(STATS, head)
    for _ in range(5):
        runner.run(_steps()[0])
    assert caplog.text.count("has not fired") == 1
    assert "hook 'head' has not fired on lm_head in 3 forwards" in caplog.text


def test_a_report_has_the_hooks_and_their_metrics(attached: Any, tmp_path: Path, caplog: Any) -> None:
    """A file for each worker, named by machine and device; a folder that cannot be made is told once."""
    caplog.set_level(logging.INFO)
    head = {**STATS, "name": "head", "target_modules": ["lm_head"]}  # read and never called
    runner, hooks = attached(STATS, head, report=tmp_path / "reports")
    runner.run(_steps()[0])
    hooks.write_report()
    (file,) = (tmp_path / "reports").iterdir()
    assert file.name.endswith("-gpu3.json")
    found = json.loads(file.read_text())
    assert (found["steps"], found["hooks"][0]["fired"]) == (1, 2)
    assert found["hooks"][0]["metrics"]
    assert [list(each["silent"]) for each in found["hooks"]] == [[], ["lm_head"]]
    (tmp_path / "taken").write_text("")
    _, blocked = attached(STATS, report=tmp_path / "taken")
    blocked.write_report()
    blocked.write_report()
    assert caplog.text.count("the report cannot be written") == 1
