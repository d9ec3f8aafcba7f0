"""Test what users of vLLM see of several workers, and how the start of an engine is read."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hookline.engines.vllm import engine_options, merge_hooks
from hookline.engines.vllm.extension import EngineFacts, choose_way
from hookline.engines.vllm.start_options import EXTENSION, StartOptions, register
from hookline.errors import OptionError


def hook(rank, sites, **others):
    found = {
        "id": "h1",
        "name": "n",
        "rank": rank,
        "sites": sites,
        "matched": list(sites),
        "fired": sum(sites.values()),
    }
    return (
        found | {"errors": 0, "off": False, "last_error": None, "cost_us": None, "last_step": 3, "silent": {}} | others
    )


def test_a_worker_that_misses_a_firing_is_not_hidden():
    answers = [{"rank": 0, "hooks": [hook(0, {"a": 5, "b": 5})]}, {"rank": 1, "hooks": [hook(1, {"a": 5, "b": 4})]}]
    merged = merge_hooks(answers)[0]
    assert (merged["fired"], merged["fired_by_rank"]) == (9, {"0": 10, "1": 9})


def test_an_error_in_one_worker_switches_off_and_counts():
    answers = [
        {"rank": 0, "hooks": [hook(0, {"a": 5})]},
        {"rank": 1, "hooks": [hook(1, {"a": 5}, errors=1, off=True, last_error="boom")]},
    ]
    merged = merge_hooks(answers)[0]
    assert (merged["errors"], merged["off"], merged["last_error"]) == (1, True, "boom")


def facts(*, compiled=True, graphs="none", version="0.32.0", runner="V1"):
    return EngineFacts(version, compiled, graphs, runner, 0, 1)


def test_the_way_to_fire():
    assert choose_way(facts(compiled=False)) == "eager"
    assert choose_way(facts()) == "on_demand"
    assert choose_way(facts(graphs="piecewise")) == "on_demand"
    with pytest.raises(OptionError, match="enforce-eager"):
        choose_way(facts(graphs="full"))
    with pytest.raises(OptionError, match="stages"):
        choose_way(replace(facts(), is_staged=True))


def test_options_of_the_start(tmp_path, monkeypatch):
    given = engine_options(hooks=tmp_path / "h.json", captured_bytes=5)
    assert given["worker_extension_cls"] == EXTENSION
    found = StartOptions.read(given["additional_config"])
    assert (found.hooks, found.captured_bytes) == (str(tmp_path / "h.json"), 5)
    monkeypatch.setenv("HOOKLINE_VLLM_HOOKS", "e.json")
    assert StartOptions.read({}).hooks == "e.json"
    assert StartOptions.read(given["additional_config"]).hooks == found.hooks
    for wrong in (
        {"hoks": "x"},
        {"hooks": ""},
        {"captured_bytes": -1},
        {"allow": "x"},
        {"allow_requests": [1]},
        {"protect": "x"},
    ):
        with pytest.raises(OptionError):
            StartOptions.read({"hookline": wrong})
    with pytest.raises(OptionError, match="dictionary"):
        StartOptions.read({"hookline": "x"})


class EngineArgs:
    """A stand-in for the class of that name in vLLM."""

    extension = None

    def create_engine_config(self):
        return SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=self.extension))


@pytest.mark.parametrize("switch", [None, "HOOKLINE_VLLM", "HOOKLINE_VLLM_HOOKS"])
def test_the_plugin_is_inert_until_asked(monkeypatch, switch):
    class Args(EngineArgs):
        create_engine_config = EngineArgs.create_engine_config

    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace(EngineArgs=Args))
    monkeypatch.delenv("HOOKLINE_VLLM", raising=False)
    monkeypatch.delenv("HOOKLINE_VLLM_HOOKS", raising=False)
    if switch:
        monkeypatch.setenv(switch, "1")
    before = Args.create_engine_config
    register()
    register()
    assert (Args.create_engine_config is before) == (switch is None)
    assert Args().create_engine_config().parallel_config.worker_extension_cls == (EXTENSION if switch else None)
    Args.extension = "other.Extension"
    if switch:
        with pytest.raises(OptionError, match=r"takes one worker extension, and this engine has other\.Extension"):
            Args().create_engine_config()


def test_the_plugin_imports_nothing_until_asked():
    code = (
        "import sys; from hookline.engines.vllm.start_options import register; register(); "
        "assert not {'torch', 'numpy', 'vllm'} & set(sys.modules)"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HOOKLINE")}
    subprocess.run([sys.executable, "-c", code], check=True, env=clean)
