"""SGLang's general dumper: settings, filters, tags, files, gradients."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookline.errors import OptionError
from hookline.sglang import Dumper, DumperConfig, dumper


def make(tmp_path: Path, **settings: Any) -> Dumper:
    return Dumper(DumperConfig(enable=True, dir=str(tmp_path), **settings))


def files(tmp_path: Path) -> dict[str, dict[str, Any]]:
    found = sorted(tmp_path.rglob("*.pt"), key=lambda path: path.name)
    return {path.stem: torch.load(path, weights_only=True) for path in found}


def test_the_dumper_of_the_process_is_off_until_asked() -> None:
    """Its settings come from the environment; a value that would have to be made is not made."""
    assert not dumper.config.enable
    dumper.dump("x", lambda: pytest.fail("was made"))


def test_settings_come_from_the_environment(monkeypatch) -> None:
    """A blank variable is none."""
    monkeypatch.setenv("DUMPER_ENABLE", "1")
    monkeypatch.setenv("DUMPER_FILTER", "layer_id == 0")
    monkeypatch.setenv("DUMPER_EXP_NAME", "")
    config = DumperConfig.from_env()
    assert (config.enable, config.filter, config.exp_name) == (True, "layer_id == 0", None)
    monkeypatch.setenv("DUMPER_ENABLE", "perhaps")
    with pytest.raises(OptionError, match="enable"):
        DumperConfig.from_env()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"enable": "perhaps"}, "enable: expected a valid boolean"),
        ({"filter": 3}, "filter: expected a valid string"),
        ({"non_intrusive_mode": "some"}, "expected 'core', 'all' or 'off'"),
        ({"dirr": "x"}, "no 'dirr'. Did you mean 'dir'?"),
        ({"filter": "layer_id =="}, "is no expression"),
    ],
)
def test_wrong_settings_are_said_at_once(wrong: dict[str, Any], says: str) -> None:
    """By the name of the setting; those that were there stay."""
    one = Dumper(DumperConfig())
    for change in (one.configure, DumperConfig):
        with pytest.raises(OptionError) as raised:
            change(**wrong)
        assert says in str(raised.value)
    assert one.config == DumperConfig()


@pytest.mark.parametrize(
    ("text", "tags", "wanted"),
    [
        ("layer_id == 3", {"layer_id": 3}, True),
        ("layer_id == 3", {}, False),
        ("not layer_id", {}, True),
        ("0 <= layer_id < 4 and layer_id % 2 == 1", {"layer_id": 3}, True),
        ("search('mlp', name) or match('q', name)", {"name": "a.mlp"}, True),
        ("search('mlp', missing)", {"name": "a.mlp"}, False),
        ("name in ('a', 'b') and place not in [1, -1]", {"name": "b", "place": 0}, True),
        ("layer_id is None", {}, True),
    ],
)
def test_a_filter_is_an_expression_over_tags(text: str, tags: dict[str, Any], wanted: bool) -> None:
    """A name that no tag has is None."""
    one = Dumper(DumperConfig(enable=True, filter=text))
    with one.capture_output() as found:
        one.dump(tags.pop("name", "x"), torch.ones(1), **tags)
    assert bool(found) is wanted


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__",
        "open('x')",
        "[x for x in (1,)]",
        "lambda: 1",
        "search(*name)",
        "name[0]",
        "2 ** 9999999",
        "f'{name}'",
        "(y := 1)",
        "~name",
    ],
)
def test_a_filter_runs_no_code(text: str) -> None:
    """Whatever is not in its grammar is refused before it is asked."""
    with pytest.raises(OptionError, match="it takes names, constants"):
        DumperConfig(filter=text)


def test_files_are_named_by_step_rank_index_name_and_tags(tmp_path, caplog) -> None:
    """A view is written alone, letters that no file may have are escaped, and meta has all tags."""
    one = make(tmp_path, exp_name="exp")
    base = torch.arange(1000.0)
    with caplog.at_level(logging.INFO, logger="hookline.sglang"):
        one.dump("q", base[2:4], dims="b s", layer_id=3)
        one.step()
        one.set_ctx(phase="decode", gone=1)
        one.set_ctx(gone=None)
        one.dump("a/b", [base[:1], {"k": base[:2]}])
        one.dump("unsaved", base, save=False)
    found = files(tmp_path / "exp")
    assert list(found) == ["step=0___rank=0___dump_index=0___name=q___layer_id=3",
                           "step=1___rank=0___dump_index=1___name=a%2Fb___phase=decode"]  # fmt: skip
    content = found["step=0___rank=0___dump_index=0___name=q___layer_id=3"]
    assert content["value"].tolist() == [2, 3]
    assert content["value"].untyped_storage().nbytes() == 8
    wanted = {"name": "q", "step": 0, "rank": 0, "layer_id": 3, "dims": "b s", "recompute_status": "disabled"}
    assert wanted.items() <= content["meta"].items()
    assert len(caplog.records) == 3
    with one.capture_output() as captured:
        one.dump("x", base, step=3)
    assert captured["x"]["meta"]["step"] == 3


def test_gradients_are_dumped_with_the_step_and_tags_of_the_forward(tmp_path) -> None:
    """Under ``grad__``, with their own dims; of tensors that need none, nothing."""
    one = make(tmp_path, enable_grad=True)
    x = torch.ones(2, requires_grad=True)
    with one.capture_output() as found:
        one.set_ctx(micro=1)
        y = x * 3
        one.dump("y", y, dims="b", dims_grad="g", tag="t")
        one.dump("plain", torch.ones(1))
        one.set_ctx(micro=2)
        one.step()
        (y * 2).sum().backward()
    assert sorted(found) == ["grad__y", "plain", "y"]
    assert found["grad__y"]["value"].tolist() == [2, 2]
    assert {"step": 0, "micro": 1, "tag": "t", "dims": "g"}.items() <= found["grad__y"]["meta"].items()


def test_core_dumps_the_well_known_arguments_and_off_attaches_nothing(tmp_path) -> None:
    """By their own names, from arguments or from the batch object among them."""

    class Batch:
        seq_lens = torch.tensor([2])

    class Model(nn.Module):
        def forward(self, input_ids, batch, *, positions=None, other=None):
            return input_ids

    model = Model()
    one = make(tmp_path)
    with one.capture_output() as found, one.register_non_intrusive_dumper(model):
        model(torch.tensor([1, 2]), Batch(), positions=torch.tensor([0, 1]), other=torch.ones(1))
    assert list(found) == ["input_ids", "positions", "seq_lens"]
    one.configure(non_intrusive_mode="off")
    assert len(one.register_non_intrusive_dumper(model)) == 0


def test_a_repeated_forward_has_its_status(tmp_path) -> None:
    """Activation checkpointing."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    one = make(tmp_path, non_intrusive_mode="all", filter="search('inputs', name) and layer_id is not None")
    with one.register_non_intrusive_dumper(model := Model()):
        model(torch.ones(1, 1)).sum().backward()
    metas = [content["meta"] for content in files(tmp_path).values()]
    assert sorted(meta["layer_id"] for meta in metas if meta["recompute_status"] == "disabled") == [0, 1, 2]
    assert sorted(meta["layer_id"] for meta in metas if meta["recompute_status"] == "recompute") == [0, 1, 2]
