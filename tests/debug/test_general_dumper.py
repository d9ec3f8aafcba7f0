"""SGLang's general dumper: settings, tags, files."""

from __future__ import annotations

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
    monkeypatch.setenv("DUMPER_DIR", "dumps")
    monkeypatch.setenv("DUMPER_EXP_NAME", "")
    config = DumperConfig.from_env()
    assert (config.enable, config.dir, config.exp_name) == (True, "dumps", None)
    monkeypatch.setenv("DUMPER_ENABLE", "perhaps")
    with pytest.raises(OptionError, match="enable"):
        DumperConfig.from_env()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"enable": "perhaps"}, "enable: expected a valid boolean"),
        ({"dir": 3}, "dir: expected a valid string"),
        ({"dirr": "x"}, "no 'dirr'. Did you mean 'dir'?"),
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


def test_files_are_named_by_step_rank_index_name_and_tags(tmp_path) -> None:
    """A view is written alone, letters that no file may have are escaped, and meta has all tags."""
    one = make(tmp_path, exp_name="exp")
    base = torch.arange(1000.0)
    one.dump("q", base[2:4], layer_id=3)
    one.step()
    one.set_ctx(phase="decode", gone=1)
    one.set_ctx(gone=None)
    one.dump("a/b", [base[:1], {"k": base[:2]}])
    found = files(tmp_path / "exp")
    assert list(found) == ["step=0___rank=0___dump_index=0___name=q___layer_id=3",
                           "step=1___rank=0___dump_index=1___name=a%2Fb___phase=decode"]  # fmt: skip
    content = found["step=0___rank=0___dump_index=0___name=q___layer_id=3"]
    assert content["value"].tolist() == [2, 3]
    assert content["value"].untyped_storage().nbytes() == 8
    wanted = {"name": "q", "step": 0, "rank": 0, "layer_id": 3, "recompute_status": "disabled"}
    assert wanted.items() <= content["meta"].items()
    with one.capture_output() as captured:
        one.dump("x", base, step=3)
    assert captured["x"]["meta"]["step"] == 3


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

    one = make(tmp_path)
    with one.register_non_intrusive_dumper(model := Model()):
        model(torch.ones(1, 1)).sum().backward()
    metas = [content["meta"] for content in files(tmp_path).values()]
    inputs = [meta for meta in metas if "layer_id" in meta and "inputs" in meta["name"]]
    assert sorted(meta["layer_id"] for meta in inputs if meta["recompute_status"] == "disabled") == [0, 1, 2]
    assert sorted(meta["layer_id"] for meta in inputs if meta["recompute_status"] == "recompute") == [0, 1, 2]
