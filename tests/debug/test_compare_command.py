"""``hookline compare``: exit codes for CI, JSON, a page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hookline.cli.main import main


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs that are the same but for one site, as safetensors files in the current folder."""
    monkeypatch.chdir(tmp_path)
    tensors = {
        f"h.{index}.mlp": torch.randn(4, 3, generator=torch.Generator().manual_seed(index)) for index in range(3)
    }
    save_file(tensors, "a.safetensors")
    tensors["h.1.mlp"] = tensors["h.1.mlp"] + 0.01
    save_file(tensors, "b.safetensors")
    return tmp_path


def test_the_exit_code_says_whether_runs_are_the_same(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 the same, 1 they differ, 2 they cannot be compared; thresholds decide."""
    assert main(["compare", "a.safetensors", "a.safetensors"]) == 0
    assert "Nothing differs." in capsys.readouterr().out
    assert main(["compare", "a.safetensors", "b.safetensors"]) == 1
    assert "Blamed: h.1.mlp." in capsys.readouterr().out
    assert main(["compare", "a.safetensors", "b.safetensors", "--atol", "0.1"]) == 0
    assert main(["compare", "a.safetensors", "b.safetensors", "--atol", "1e-3"]) == 1
    assert main(["compare", "a.safetensors", "b.safetensors", "--threshold", "h.#.mlp=0.5"]) == 0
    capsys.readouterr()
    save_file({"h.0.mlp": torch.randn(4, 3, generator=torch.Generator().manual_seed(0))}, "c.safetensors")
    assert main(["compare", "a.safetensors", "c.safetensors"]) == 1
    assert "h.1.mlp output" in capsys.readouterr().out
    assert main(["compare", "a.safetensors", "nowhere"]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["compare", "a.safetensors", "b.safetensors", "--threshold", "h=x:1"]) == 2
    Path("broken.safetensors").write_bytes(b"no safetensors")
    assert main(["compare", "a.safetensors", "broken.safetensors"]) == 2


def test_folders_of_arrays_are_compared_with_the_same_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hand-written dumps, whose files are named by sites, in folders or not."""
    monkeypatch.chdir(tmp_path)
    x = np.linspace(1, 2, 12, dtype=np.float32).reshape(3, 4)
    runs = {"a": x, "same": x, "off": x * 1.1, "shape": x[:2], "swapped": x.astype(">f4")}
    for name, array in runs.items():
        (tmp_path / name / "deep").mkdir(parents=True)
        np.save(tmp_path / name / "layers.2.npy", x)
        np.save(tmp_path / name / "deep" / "layers.10.npy", array)
    codes = {name: main(["compare", "a", name]) for name in runs}
    assert codes == {"a": 0, "same": 0, "off": 1, "shape": 1, "swapped": 0}
    capsys.readouterr()
    assert main(["compare", "a", "off", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["blamed"][0]["module"] == "deep/layers.10"
    assert main(["compare", "a", "off", "--rtol", "0.2"]) == 0
    for name in ("a", "same"):
        np.save(tmp_path / name / "words.npy", ["no numbers"])
    assert main(["compare", "a", "same"]) == 1
    assert "words.npy was left out" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main(["compare", "a", "empty"]) == 2


def test_json_has_everything_and_the_page_is_one_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For scripts and agents: strict JSON, the worst value first."""
    assert main(["compare", "a.safetensors", "b.safetensors", "--json", "--html", "out/page.html"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["format"], found["ok"]) == ("hookline.compare", False)
    assert found["blamed"][0]["module"] == found["values"][0]["site"] == "h.1.mlp"
    assert found["values"][0]["max_abs"] == pytest.approx(0.01, rel=1e-3)
    text = Path("out/page.html").read_text()
    assert "{{" not in text
    assert "http" not in text.replace("http-equiv", "")
