"""Hooks through SGLang's own plugin loader, registry, model runner, batches and hook manager, on a CPU.

Untested here, and read from the sources: a whole engine, CUDA graphs, several ranks.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import tomllib
import warnings
from contextlib import nullcontext
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from helpers_sglang import seeded_decoder

from hookline.engines.sglang import SglangHooks, hooks_of_runner
from hookline.engines.sglang.runner_hooks import AROUND_CAPTURE, CAN_RUN_GRAPH, RUNNER
from hookline.factories.served_batch import tokens_of_batch

ROOT = Path(__file__).parent.parent
SPECS = [
    {
        "name": "stats",
        "target_modules": ["model.layers.*"],
        "exclude": ["*.mlp*"],
        "hook_factory": "hookline.factories:activation_stats",
    },
    {
        "name": "push",
        "target_modules": ["model.layers.0"],
        "hook_factory": "hookline.factories:steer",
        "config": {"vector": [1.0] * 8, "requests": ["b"]},
    },
]


@pytest.fixture(scope="module")
def modules(sglang: Any) -> Any:
    """SGLang's modules that the plugin touches."""
    paths = {
        "plugins": "sglang.srt.plugins",
        "registry": "sglang.srt.plugins.hook_registry",
        "runner": "sglang.srt.model_executor.model_runner",
        "batches": "sglang.srt.model_executor.forward_batch_info",
        "manager": "sglang.srt.model_executor.hook_manager",
        "setup": AROUND_CAPTURE[0].rpartition(".")[0],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no GPU
        return SimpleNamespace(**{name: importlib.import_module(path) for name, path in paths.items()})


def _entry_points() -> EntryPoints:
    """The entry points of this project as its file declares them, installed or not."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    return EntryPoints(EntryPoint(name, value, "sglang.srt.plugins") for name, value in declared.items())


class Graphs:
    """A decode graph runner that would replay everything."""

    def __init__(self, runner: Any) -> None:
        self.model_runner = runner

    def can_run_graph(self, forward_batch: Any) -> bool:
        return True

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a graph was replayed, in which no hook fires")


@pytest.fixture(scope="module")
def runner(modules: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A real ``ModelRunner`` with our plugin loaded by SGLang; only loading weights and running kernels are ours."""
    patch = pytest.MonkeyPatch()
    file = tmp_path_factory.mktemp("hooks") / "hooks.json"
    file.write_text(json.dumps(SPECS))
    patch.setenv("HOOKLINE_SGLANG_HOOKS", str(file))
    kind = modules.runner.ModelRunner
    patch.setattr(kind, "load_model", lambda self: setattr(self, "model", seeded_decoder()))
    graph_runners = importlib.import_module(CAN_RUN_GRAPH[0].rpartition(".")[0].rpartition(".")[0])
    patch.setattr(graph_runners.DecodeCudaGraphRunner, "can_run_graph", Graphs.can_run_graph)
    patch.setattr(modules.plugins, "entry_points", lambda group: _entry_points())
    for name in ("get_exec", "get_schedule", "get_model", "get_parallel"):
        patch.setattr(modules.runner, name, MagicMock())
    modules.runner.get_exec().moe.elastic_ep_backend = None
    modules.runner.get_model().override = lambda **_: nullcontext()
    modules.plugins.load_plugins()
    made = object.__new__(kind)
    made.load_model()
    _complete(made, graph_runners.DecodeCudaGraphRunner)
    yield made
    hooks = hooks_of_runner(made)
    assert hooks is not None
    hooks.close()
    patch.undo()
    modules.registry.HookRegistry.reset()


def _complete(runner: Any, graph_runner: type) -> None:
    """Give a runner the attributes that its own ``forward`` reads."""
    graphs = object.__new__(
        type("AllGraphs", (graph_runner,), {"execute": Graphs.execute, "__abstractmethods__": None})
    )
    graphs.model_runner = runner
    nothing = (
        "msprobe_debugger",
        "canary_manager",
        "eplb_manager",
        "hisparse_coordinator",
        "prefill_cuda_graph_runner",
    )
    runner.__dict__.update(dict.fromkeys(nothing))
    runner.__dict__.update(
        device="cuda", gpu_id=0, is_draft_worker=False, enable_elastic_ep=False, forward_pass_id=0,
        attn_backend=MagicMock(), decode_cuda_graph_runner=graphs, eager_runner=SimpleNamespace(execute=_Eager(runner)),
        pp_group=SimpleNamespace(is_last_rank=False), _prepare_eager_forward_batch=lambda batch: None,
        _maybe_execute_deferred_mamba_cow_and_clear=lambda batch: None,
    )  # fmt: skip
    runner.model.shared_experts_config = None


class _Eager:
    def __init__(self, runner: Any) -> None:
        self._model = runner.model

    def __call__(self, forward_batch: Any, pp_proxy_tensors: Any = None) -> Any:
        with torch.no_grad():
            return self._model(forward_batch.input_ids, forward_batch.positions, forward_batch)


def _batch(modules: Any, mode: str, names: list[str], lengths: list[int], prefixes: list[int]) -> Any:
    total = sum(lengths)
    extend = {} if mode == "DECODE" else {"extend_seq_lens_cpu": lengths, "extend_prefix_lens_cpu": prefixes}
    return modules.batches.ForwardBatch(
        forward_mode=modules.batches.ForwardMode[mode], batch_size=len(names), input_ids=torch.arange(total) % 32,
        req_pool_indices=torch.arange(len(names)), seq_lens=torch.tensor(lengths), out_cache_loc=torch.arange(total),
        seq_lens_sum=total, rids=names, positions=torch.arange(total), **extend,
    )  # fmt: skip


def test_the_places_that_the_plugin_wraps_are_there(modules: Any) -> None:
    """Each path leads to a function of SGLang, and takes what the plugin reads."""
    for path in (f"{RUNNER}.load_model", f"{RUNNER}.forward", *AROUND_CAPTURE, *CAN_RUN_GRAPH):
        owner, _, name = path.rpartition(".")
        found = getattr(modules.registry.pkgutil.resolve_name(owner), name)
        assert callable(found), path
    forward = inspect.signature(modules.runner.ModelRunner.forward)
    assert list(forward.parameters)[:2] == ["self", "forward_batch"]
    for path in AROUND_CAPTURE:
        captures = inspect.signature(getattr(modules.setup, path.rpartition(".")[2]))
        assert captures.parameters["model_runner"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "self.load_model()" in inspect.getsource(modules.runner.ModelRunner.initialize)
    assert "capture_cuda_graphs(" not in inspect.getsource(modules.runner.ModelRunner.initialize)
    assert "can_run_graph(forward_batch)" in inspect.getsource(modules.runner.ModelRunner._forward_raw)


def test_forward_batches_and_modes_have_what_rows_are_read_from(modules: Any) -> None:
    """The real enumeration and the real dataclass, in every mode that the table knows."""
    names = {field.name for field in modules.batches.ForwardBatch.__dataclass_fields__.values()}
    assert {"rids", "input_ids", "positions", "extend_seq_lens_cpu", "extend_prefix_lens_cpu"} <= names
    assert "tbo_split_seq_index" in names
    table = tokens_of_batch(_batch(modules, "MIXED", ["a", "b"], [3, 1], [0, 5]))
    assert table is not None
    assert table.phases == ("prefill", "decode")
    verified = _batch(modules, "TARGET_VERIFY", ["a", "b"], [2, 2], [])
    verified.extend_seq_lens_cpu = None
    assert (found := tokens_of_batch(verified)) is not None
    assert found.lengths == (2, 2)
    assert tokens_of_batch(_batch(modules, "IDLE", ["a"], [1], [0])) is None


def test_the_plugin_attaches_after_loading_and_forwards_fire_without_graphs(modules: Any, runner: Any) -> None:
    """``load_plugins`` found it; the runner's own ``forward`` chooses eager, and every row is its request's."""
    hooks = hooks_of_runner(runner)
    assert hooks is not None
    assert [live.name for live in hooks.live.list()] == ["stats", "push"]
    for mode, lengths, own in (("EXTEND", [3, 2], slice(3, 5)), ("DECODE", [1, 1], slice(1, 2))):
        batch = _batch(modules, mode, ["a", "b"], lengths, [0, 0])
        out = runner.forward(batch)
        assert out.can_run_graph is False
        with torch.no_grad():
            plain = seeded_decoder()(batch.input_ids, batch.positions, batch)
        assert torch.equal(out.logits_output[: own.start], plain[: own.start])
        assert not torch.isclose(out.logits_output[own], plain[own]).all(dim=-1).any()
    assert hooks.steps == 2
    assert [live.fired for live in hooks.live.list()] == [4, 2]
    assert hooks.live.metrics()["h1"]


def test_a_runner_without_hooks_replays_its_graphs(modules: Any, runner: Any) -> None:
    """The negative control: with the hooks off, the same forward goes to the graph."""
    hooks = hooks_of_runner(runner)
    assert hooks is not None
    for live in hooks.live.list():
        hooks.live.remove(live.id)
    with pytest.raises(AssertionError, match="a graph was replayed"):
        runner.forward(_batch(modules, "DECODE", ["a", "b"], [1, 1], []))


def test_hidden_states_and_hooks_at_run_time(modules: Any, runner: Any) -> None:
    """After the test above no hook is on; one request asks for both, and gets its own rows and no others."""
    hooks = hooks_of_runner(runner)
    assert hooks is not None
    steer = {**SPECS[1], "config": {"vector": [1.0] * 8}}
    asked = {"hidden_states": {"layers": ["model.layers.1"]}, "hooks": [steer]}
    hooks.ask("b", asked)
    (stats,) = hooks.add(SPECS[0])
    own_logits = []
    for mode, lengths, prefixes, positions in (
        ("EXTEND", [3, 2], [0, 0], [0, 1, 2, 0, 1]),
        ("DECODE", [1, 1], [], [3, 2]),
    ):
        batch = _batch(modules, mode, ["a", "b"], lengths, prefixes)
        batch.positions = torch.tensor(positions)
        out = runner.forward(batch)
        assert out.can_run_graph is False
        with torch.no_grad():
            plain = seeded_decoder()(batch.input_ids, batch.positions, batch)
        assert torch.equal(out.logits_output[: lengths[0]], plain[: lengths[0]])
        assert not torch.isclose(out.logits_output[lengths[0] :], plain[lengths[0] :]).all(dim=-1).any()
        own_logits.append(out.logits_output[lengths[0] :])
    (found,) = hooks.take("b")
    layer = found["states"]["model.layers.1"]
    assert (found["error"], layer["positions"], found["hooks"][0]["rows"]) == (None, [0, 1, 2], 3)
    states = torch.frombuffer(bytearray(layer["data"]), dtype=torch.float32).reshape(layer["shape"])
    torch.testing.assert_close(states @ runner.model.lm_head.weight.T, torch.cat(own_logits))
    assert stats.fired == 4
    hooks.live.remove(stats.id)
    assert not hooks.is_active


def test_what_tensor_parallelism_cuts_is_refused(modules: Any) -> None:
    """Each worker has a part of the columns; SGLang's context of the process says into how many they are cut."""
    model = seeded_decoder()
    model.qkv_proj = type("QKVParallelLinear", (torch.nn.Linear,), {})(8, 8)
    context = importlib.import_module("sglang.srt.runtime_context")
    with context.get_parallel().override(tp_size=2):
        hooks = SglangHooks(SimpleNamespace(model=model))
    hooks.ask("a", {"hidden_states": {"layers": ["qkv_proj"]}})
    hooks.run(lambda: None, _batch(modules, "EXTEND", ["a"], [3], [0]))
    (found,) = hooks.take("a")
    assert "each worker has a part of its output" in found["error"]["message"]
    hooks.close()


@pytest.mark.parametrize(
    ("factory", "config"),
    [
        ("activation_stats", {}),
        ("nan_alarm", {}),
        ("steer", {"vector": [1.0] * 8}),
        ("export", {"folder": "exported"}),
        ("probe", {"head": {"layers": [{"weight": [[1.0] * 8], "bias": [0.0]}]}, "add_residual": True}),
    ],
)
def test_our_factories_work_through_its_hook_manager(
    modules: Any, factory: str, config: dict[str, Any], tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--forward-hooks`` of SGLang itself takes them: its matching, its registering, plain torch hooks."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    model = seeded_decoder()
    spec = {"name": factory, "target_modules": ["model.layers.?"], "hook_factory": f"hookline.factories:{factory}"}
    modules.manager.register_forward_hooks(model, [{**spec, "config": config}])
    assert caplog.text.count("Registered forward hook") == 2
    batch = _batch(modules, "EXTEND", ["a", "b"], [3, 2], [0, 0])
    with torch.no_grad():
        found = model(batch.input_ids, batch.positions, batch)
        plain = seeded_decoder()(batch.input_ids, batch.positions, batch)
    assert torch.equal(found, plain) is (factory != "steer")
    for layer in model.model.layers:
        for hook in layer._forward_hooks.values():
            assert factory == "steer" or not hasattr(hook, "to_metrics") or hook.to_metrics(), "it saw nothing"
            getattr(hook, "close", lambda: None)()
