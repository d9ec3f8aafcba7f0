"""The CUDA kernel where there is no GPU: its numbers in Triton's interpreter, its machine code by Triton's compiler."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import hookline as hl
from hookline.observe.watch import kernel
from hookline.observe.watch.engine import StatsEngine
from hookline.observe.watch.row import Layout

_HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not _HAS_TRITON, reason="needs Triton")


@pytest.mark.skipif(
    not _HAS_TRITON or tuple(map(int, version("triton").split(".")[:2])) < (3, 9),
    reason="needs Triton 3.9 or later, whose interpreter works with numpy 2.4",
)
def test_the_kernel_finds_the_numbers_of_float64_in_the_interpreter(tmp_path: Path) -> None:
    """All of cases_kernel.py holds; in another process, since Triton asks for its interpreter when it is imported."""
    cases = Path(__file__).with_name("cases_kernel.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\d passed", done.stdout), done.stdout


_PAIRS = {name: {"LOWER": f"min.NaN.{kind} $0, $1, $2;", "HIGHER": f"max.NaN.{kind} $0, $1, $2;"}
          for name, kind in {"bfloat16": "bf16x2", "float16": "f16x2"}.items()}  # fmt: skip
_VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"ELEMENT": "bfloat16", **_PAIRS["bfloat16"]},
    "float16": {"ELEMENT": "float16", **_PAIRS["float16"]},
    "bfloat16, four thresholds": {"ELEMENT": "bfloat16", "OVER": 4},
    "float32": {"ELEMENT": "float32"},
    "int64, anywhere in memory": {"ELEMENT": "int64", "WIDE": "float64", "ALIGNED": False},
}
_USUAL = {"WIDE": "float32", "ALIGNED": True, "LOWER": "", "HIGHER": "", "OVER": 0, "JOBS": 256}


@needs_triton
@pytest.mark.parametrize("name", _VARIANTS)
def test_the_kernel_compiles_for_a_hopper_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code comes out; aligned tensors are read 16 bytes at a time, and halves are compared two at a time."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    text = _compiled("reduce_chunks", _USUAL | _VARIANTS[name])
    aligned = _VARIANTS[name].get("ALIGNED", True)
    assert len(re.findall(r"ld\.global\.v4\.b32", text)) == (4 if aligned else 0)
    assert ("min.u16x2" in text) == ("LOWER" in _VARIANTS[name])


@needs_triton
@pytest.mark.parametrize(
    ("name", "constants", "adds"),
    [
        ("merge_slots", {"WIDTH": 256}, r"add(\.rn)?\.f64"),
        ("fold_rows", {"WIDTH": 2048}, r"add(\.rn)?\.f64"),
        ("count_exponents", {"ELEMENT": "bfloat16", "JOBS": 256, "WIDTH": 4096}, r"(atom|red)\.global\S*\.add\.u64"),
    ],
)
def test_the_small_programs_compile_too(
    name: str, constants: dict[str, Any], adds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machine code comes out, and adds up in 64 bits."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert re.search(adds, _compiled(name, constants))


def _compiled(name: str, constants: dict[str, Any]) -> str:
    """The PTX of a program for sm_90, if a cubin can be made of it."""
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as build

    program = kernel.program_named(name)
    if "ELEMENT" in constants:
        constants = constants | {key: getattr(tl, constants[key]) for key in ("ELEMENT", "WIDE") if key in constants}
        constants.setdefault("WIDTH", kernel.width_of(constants["ELEMENT"].primitive_bitwidth // 8))
    signature = {each.name: "constexpr" if each.is_constexpr else each.annotation_type for each in program.params}
    places = {(program.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn=program, signature=signature, constexprs=places)
    made = build(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": True})
    assert made.asm["cubin"]
    return str(made.asm["ptx"])


def test_without_triton_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the package needs Triton to be imported, and a GPU without it is no place for the kernel."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    kernel.is_available.cache_clear()
    engine = StatsEngine(Layout.of(None))
    try:
        assert not kernel.is_available(torch.device("cuda"))
        with pytest.warns(hl.HooklineWarning, match="pip install triton"):
            assert engine.kernel(torch.device("cuda", 0)) is None
        assert engine.kernel(torch.device("cuda", 0)) is None  # said once
    finally:
        kernel.is_available.cache_clear()
    code = "import sys; sys.modules['triton'] = None; import hookline as hl; assert hl.watch; print('fine')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "fine\n", done.stderr
    assert hl.watch
