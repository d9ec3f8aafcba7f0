"""Traces and arrays on disk, compared in Python and by the command; faults of both that were found once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_compared import IDS, gpt2
from safetensors.torch import save_file
from torch import Tensor, nn

import hookline as hl
from hookline.cli.main import main
from hookline.debug import padded_rows, read_trace
from hookline.debug.compare.compare import compare
from hookline.debug.compare.trace import trace
from hookline.errors import CompareError
from hookline.when import StepSchedule


def _traced(model: nn.Module, to: Path, run: Any = None, **options: Any) -> Path:
    options = {"kinds": ("input", "output"), "exclude": "*.attn_dropout", **options}
    with trace(model, to=to, **options) as running, torch.no_grad():
        model(IDS) if run is None else run(model, running)
    return to


def test_fingerprints_alone_find_the_module_and_say_that_errors_are_estimates(tmp_path: Path) -> None:
    """And bfloat16 is still rounding."""
    a, wrong = _traced(gpt2(), tmp_path / "a"), gpt2()
    wrong.transformer.h[4].ln_2.eps = 1e-4
    found = compare(a, _traced(wrong, tmp_path / "b"))
    assert [blame.module for blame in found.blamed] == ["transformer.h.4.ln_2"]
    assert found.is_estimate
    assert "estimates from fingerprints" in found.summary
    assert compare(a, _traced(gpt2().bfloat16(), tmp_path / "c")).ok


def test_steps_that_do_not_meet_are_told(tmp_path: Path) -> None:
    """One step beside one other is compared, and said; two steps beside one other cannot be."""

    def traced(name: str, steps: int, first: int = 0) -> Path:
        torch.manual_seed(0)
        options = {"every": StepSchedule(warmup=first)}
        return _traced(nn.Linear(8, 8), tmp_path / name, lambda model, _: [model(x) for _ in range(steps)], **options)

    x = torch.ones(2, 8)
    one, late, two = traced("one", 1), traced("late", 6, first=5), traced("two", 2)
    found = compare(one, late)
    assert found.ok
    assert found.notes == ["Steps 0 of A are compared with steps 5 of B, in this order."]
    with pytest.raises(CompareError, match=r"A has steps \[0, 1\], B has \[5\]"):
        compare(two, late)
    assert any("only in A" in line for line in compare(two, one).missing)


class WritesUnseen(nn.Module):
    """Doubles what it is given by way of ``.data``, which counts no new version."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(2)
        return x


def test_a_tensor_that_was_written_to_unseen_has_a_new_fingerprint(tmp_path: Path) -> None:
    """The same object twice, with other numbers in it: each record has the norm of the tensor beside it."""
    with hl.trace(nn.Sequential(nn.Identity(), WritesUnseen()), to=tmp_path, kinds="output", tensors=True) as running:
        running._hooks._model(torch.ones(3))
    norms = [(record.fingerprint.norm, float(record.tensor().norm())) for record in read_trace(tmp_path).records]  # type: ignore[union-attr]
    assert [one for one, _ in norms] == pytest.approx([other for _, other in norms])
    assert len({round(one, 3) for one, _ in norms}) == 2


def test_gradients_of_forwards_long_ago_begin_no_steps(tmp_path: Path) -> None:
    """300 forwards, then one backward through all of them: what is forgotten is told, and gets no number."""
    model = nn.Linear(2, 1)
    with pytest.warns(hl.HooklineWarning, match="before the last 256"):  # noqa: SIM117
        with hl.trace(model, to=tmp_path, kinds=("output", "output_grad")):
            torch.stack([model(torch.ones(1, 2)).sum() for _ in range(300)]).sum().backward()
    folder = read_trace(tmp_path)
    assert folder.steps == tuple(range(300))
    assert sum(record.kind == "output_grad" for record in folder.records) == 256
    assert any("left out" in note for note in folder.left_out)


def test_what_a_user_notes_makes_no_difference(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with hl.trace(nn.Identity(), to=tmp_path / name, kinds="output") as running:
            running._hooks._model(torch.ones(2))
            if name == "b":
                running.note("batch 7 was left out by the sampler; the budget is spent")
    found = hl.compare(tmp_path / "a", tmp_path / "b")
    assert found.ok
    assert any("by the sampler" in note for note in found.notes)


def test_rows_are_those_of_the_batch_and_never_of_parameters(tmp_path: Path) -> None:
    """A weight of as many rows as the batch has tokens, beside left and right padding."""
    torch.manual_seed(0)
    model, mask = nn.Linear(16, 8), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    tokens = torch.randn(2, 4, 16) * mask[..., None]
    turned, places = (
        mask.flip(1),
        torch.stack([row.roll(4 - int(count), 0) for row, count in zip(tokens, mask.sum(1), strict=True)]),
    )
    for name, x in (("a", tokens), ("b", places)):
        with hl.trace(model, to=tmp_path / name, kinds=("output", "parameter"), tensors=True), torch.no_grad():
            model(x)
    found = hl.compare(tmp_path / "a", tmp_path / "b", rows=(padded_rows(mask), padded_rows(turned)))
    assert found.ok
    assert all(not value.is_by_rows for value in found.values if value.kind == "parameter")


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
