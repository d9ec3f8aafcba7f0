"""The precision checker: what it writes, what it refuses, and that the run keeps every bit."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import pytest
import torch
from helpers_training import differences, plain_step, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.debug.precision import precision_checker
from hookline.debug.precision.precision_checker import (
    PrecisionChecker,
    PrecisionFiles,
    hash_of,
    local_copy,
    measure,
    numbers_text,
)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


def lines(checker: PrecisionChecker) -> list[str]:
    assert checker.folder is not None
    return (checker.folder / "precision_check_rank_0.log").read_text().splitlines()


def stems(checker: PrecisionChecker) -> list[str]:
    return [record.stem for record in checker.records]


@pytest.mark.parametrize("config", ["level=1,format=md5,save_tensors=1", "level=2"])
def test_a_checked_run_keeps_every_bit(config: str, tmp_path) -> None:
    """Dropout, BatchNorm, an in-place ReLU, AdamW, 20 steps."""
    checkers: list[PrecisionChecker] = []

    def step(model: nn.Sequential, x: Tensor, target: Tensor) -> None:
        if not checkers:
            checkers.append(PrecisionChecker(model, config, path=tmp_path))
        plain_step(model, x, target)

    assert differences(train(plain_step), train(step)) == []
    checkers[0].remove()
    assert {record.stage for record in checkers[0].records} >= {"forward", "backward"}


def test_every_dtype_is_measured_by_its_own_numbers() -> None:
    """Bytes of another dtype are never read as float32."""
    values = [1.0, -2.0, 0.0, 3.0]
    floats = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    for dtype in [*floats, torch.int64, torch.int32, torch.int16, torch.int8]:
        plain = local_copy(torch.tensor(values).to(dtype))
        assert plain is not None
        numbers = measure(plain)
        assert (numbers.minimum, numbers.maximum, numbers.mean, numbers.nan, numbers.inf) == (-2, 3, 0.5, 0, 0), dtype
        assert "[1, -2, 0, 3]" in numbers_text(numbers, plain)
        raw = plain.view(torch.uint8).numpy().tobytes()
        assert hash_of(plain) == hashlib.md5(raw).hexdigest()
    assert measure(torch.tensor([True, False, True, True])).mean == 0.75
    assert measure(torch.tensor([255, 1], dtype=torch.uint8)).maximum == 255
    assert measure(torch.tensor([2**62 + 1, 0])).maximum == 2**62 + 1
    conjugate = local_copy(torch.tensor([1 + 2j, 3 - 5j]).conj())
    assert conjugate is not None
    assert (measure(conjugate).minimum, measure(conjugate).maximum) == (-2, 5)
    sparse = local_copy(torch.tensor([[0.0, 7.0]]).to_sparse())
    assert sparse is not None
    assert measure(sparse).maximum == 7
    assert local_copy(torch.empty(3, device="meta")) is None


def test_a_hash_with_a_tolerance_is_one_for_nearly_equal_values_of_any_dtype() -> None:
    """Rounded to multiples of the tolerance; NaN and -0.0 have one form each."""
    x = torch.tensor([0.1, -2.5003, 7.0, 0.0])
    assert hash_of(x, 1e-3) == hash_of(x + 5e-5, 1e-3)
    assert hash_of(x, 1e-3) == hash_of(x.double(), 1e-3)
    assert hash_of(x, 1e-3) != hash_of(x + 2e-3, 1e-3)
    assert hash_of(torch.tensor([-0.0, 1.0]), 1e-3) == hash_of(torch.tensor([0.0, 1.0]), 1e-3)
    odd = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
    assert hash_of(odd[:1], 1e-3) == hash_of(odd[1:], 1e-3)
    assert hash_of(odd[:1]) != hash_of(odd[1:])


def test_the_hooks_come_off_and_init_twice_does_not_double(tmp_path) -> None:
    """Each call is one line, however often `init` was called; after `remove`, none."""
    model = mlp()
    with PrecisionChecker(model, path=tmp_path) as checker:
        checker.init()
        model(torch.ones(1, 4))
        assert len(lines(checker)) == 4  # each is flushed: a killed process leaves them
        assert stems(checker) == ["0_0_forward", "1_0_forward", "2_0_forward", "Sequential_0_forward"]
    hl.assert_no_hooks(model, foreign=True)
    model(torch.ones(1, 4))
    assert len(checker.records) == len(lines(checker)) == 4
    checker.remove()
    checker.init()
    checker.reset_counters()
    model(torch.ones(1, 4))
    checker.remove()
    assert len(checker.records) == 4
    assert len(lines(checker)) == 8
    hl.assert_no_hooks(model, foreign=True)


def test_context_is_in_every_line_and_reset_forgets_it(tmp_path) -> None:
    """Micro-batch, layer, the layer's name, iteration; a layer's number comes from the name if none is set."""
    model = nn.ModuleDict({"layers": nn.Sequential(mlp(), mlp())})
    with PrecisionChecker(model, path=tmp_path) as checker:
        layer = model["layers"][1][0]
        layer(torch.ones(1, 4))
        checker.set_iteration(7)
        checker.set_gas(2)
        checker.set_layer(5)
        checker.set_layer_name("decoder")
        layer(torch.ones(1, 4))
        checker.reset()
        layer(torch.ones(1, 4))
        checker.set_iteration(None)
    starts = [line.partition(" layers")[0] for line in lines(checker)]
    assert starts == ["[GAS-0] [L-1]", "[I-7] [GAS-2] [L-5] decoder", "[GAS-0] [L-1]"]


def test_a_gradient_is_checked_once_and_a_recomputed_forward_is_not_checked_again(tmp_path) -> None:
    """Activation checkpointing runs the forward twice."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out

    model = Checkpointed()
    with PrecisionChecker(model, path=tmp_path, level=2) as checker:
        model(torch.ones(1, 4)).sum().backward()
    found = [record.stem for record in checker.records if record.name == "inner.0"]
    assert found == ["inner.0_0_forward", "inner.0_0_backward"]
    assert not any(record.index for record in checker.records)


def test_one_module_may_have_options_of_its_own(tmp_path) -> None:
    """It is then checked by those alone: its outputs, and the gradients of its inputs."""
    model = mlp()
    with PrecisionChecker(model, path=tmp_path) as checker:
        checker.register_for_module(model[2], name="head", abort_on_error=True)
        model(torch.ones(1, 4)).sum().backward()
        shapes = {record.stem: record.shape for record in checker.records}
        assert shapes["head_0_forward"] == (1, 2)
        assert shapes["head_0_backward"] == (1, 5)
        assert not any(stem.startswith("2_") for stem in shapes)
        with torch.no_grad():
            model[0].bias[0] = float("inf")
        with pytest.raises(FloatingPointError, match=r"aborting! .*head_1_forward.*<- ERROR"):
            model(torch.ones(1, 4))
        with pytest.raises(ValueError, match="check_nan, check_inf, abort_on_error, not 'level'"):
            checker.register_for_module(model[0], level=True)
    hl.assert_no_hooks(model, foreign=True)
    off = PrecisionChecker(model, level=0)
    assert len(off.register_for_module(model[0])) == len(off.register_for_function("*.relu")) == 0
    hl.assert_no_hooks(model, foreign=True)


def test_abort_on_error_ends_the_backward_too_and_the_line_is_written(tmp_path) -> None:
    """The error names the module."""
    model = mlp()
    with PrecisionChecker(model, path=tmp_path, abort_on_error=True) as checker:
        out = model(torch.ones(1, 4))
        with pytest.raises(hl.errors.NonFiniteError, match="backward tensor"):
            (out * float("inf")).sum().backward()
        assert lines(checker)[-1].endswith("<- ERROR")
        checker.register_for_module(model[0], check_inf=False, check_nan=False)


def test_without_a_model_every_module_of_the_process_is_checked(tmp_path) -> None:
    """Names come from the outermost call, or from a map of one's own."""
    model = mlp()
    with PrecisionChecker(config=f"level=1,path={tmp_path}") as checker:
        assert set(checker.build_name_map(nn.ModuleDict({"net": model}))) == {"net", "net.0", "net.1", "net.2"}
        model(torch.ones(1, 4))
    assert [record.name for record in checker.records] == ["net.0", "net.1", "net.2", "net"]
    assert hl.attached() == []


@pytest.mark.slow
def test_a_compiled_model_is_checked_too(tmp_path) -> None:
    """In one graph, by the numbers of the eager run; functions are not seen in there, which is said."""
    torch.compiler.reset()
    model = mlp()
    eager, compiled = (PrecisionChecker(model, path=tmp_path, format="md5") for _ in range(2))
    eager.remove(), compiled.remove()
    for checker, call in ((eager, model), (compiled, torch.compile(model, backend="aot_eager", fullgraph=True))):
        checker.init()
        call(torch.ones(1, 4))
        checker.remove()
    assert [str(record) for record in compiled.records] == [str(record) for record in eager.records]
    checker = PrecisionChecker(model, path=tmp_path, level=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hl.HooklineWarning)  # said once in a process
        torch.compile(model, backend="eager")(torch.ones(1, 4))
    with pytest.warns(hl.errors.HookNeverFired, match="never fired on .* functions"):
        checker.remove()
    assert [record.name for record in checker.records] == ["0", "1", "2", "Sequential"]
    torch.compiler.reset()


def test_a_path_that_never_worked_is_an_error(tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(OSError, match="taken"):
        PrecisionFiles(str(tmp_path / "taken"), save=False).write("line", "a", torch.ones(1))


def test_a_full_disk_ends_the_files_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError("No space left on device")

    files = PrecisionFiles(str(tmp_path), save=True)
    files.write("first", "a", torch.ones(1))
    monkeypatch.setattr(precision_checker.np, "save", full)
    for stem in "bc":
        files.write("later", stem, torch.ones(1))
    files.close()
    assert caplog.text.count("No space left on device") == 1


@pytest.mark.parametrize("option", [{"md5_tolerance": -1}, {"level": True}])
def test_options_that_make_no_sense_are_refused(option) -> None:
    with pytest.raises(hl.errors.OptionError, match=r"0, 1 or 2, md5_tolerance a number of 0 or more; got level="):
        PrecisionChecker(mlp(), **option)
