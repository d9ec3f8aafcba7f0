"""``--hook-config``: text by the hook's signature."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
from helpers_cli import EXPERIMENTS, TINY, run_here

from hookline.errors import ConfigError
from hookline.runs.build import build
from hookline.runs.flags import from_text
from hookline.runs.run import Run


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("500", int, 500),
        ("1e-3", float, 0.001),
        ("500", float, 500.0),
        ("inf", float, math.inf),
        ("true", bool, True),
        ("OFF", bool, False),
        ("0", bool, False),
        ("true", str, "true"),
        ("1e3", str, "1e3"),
        ("a=b.c", str, "a=b.c"),
        ("none", int | None, None),
        ("7", int | None, 7),
        ("none", str | None, None),
        ("x", int | str, "x"),
        ("7", int | str, 7),
        ("2,5,10", list[int], [2, 5, 10]),
        ("[2, 5]", list[int], [2, 5]),
        ("", list[int], []),
        ("2,5", tuple[int, ...], (2, 5)),
        ("2,0.5", tuple[int, float], (2, 0.5)),
        ("a,b", list[str] | None, ["a", "b"]),
        ("slow", Literal["fast", "slow"], "slow"),
        ("3", Literal[1, 3], 3),
        ("3", Any, 3),
        ("0.5", Any, 0.5),
        ("true", Any, True),
        ("abc", Any, "abc"),
    ],
)
def test_a_text_becomes_what_is_declared(text, hint, value):
    """To the type."""
    found = from_text(text, hint)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "hint", "said"),
    [
        ("1.5", int, "valid integer"),
        ("x", float, "valid number"),
        ("true", float, "valid number"),
        ("maybe", bool, "valid boolean"),
        ("x", int | None, "valid integer"),
        ("quick", Literal["fast", "slow"], "'fast' or 'slow'"),
        ("1,2,3", tuple[int, int], "expected"),
        ("1,x", list[int], "expected"),
    ],
)
def test_a_misfit_says_what_was_expected(text, hint, said):
    """In words."""
    with pytest.raises(ConfigError, match=said):
        from_text(text, hint)


def test_a_hook_gets_its_arguments_by_type(tmp_path):
    """Through the whole command line; flags of the same name join."""
    code = run_here(
        "run", TINY, "--epochs", "1", "--silent", "--no-report", "--hooks", f"{EXPERIMENTS}:NotedHook",
        "--hook-config", "noted.count=3", "noted.scale=1e-3", "noted.on=true", "noted.word=1",
        "--hook-config", "noted.limit=none", "noted.lags=1,2", "noted.windows=4,5", "noted.mode=slow",
        "--hook-config", "noted.anything=7",
    )  # fmt: skip
    assert code == 0
    import experiments

    assert experiments.NotedHook.made[-1] == {
        "count": 3, "scale": 0.001, "on": True, "word": "1", "limit": None,
        "lags": [1, 2], "windows": (4, 5), "mode": "slow", "anything": 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("norms", "Invalid --hook-config format: 'norms' (expected hook_name.param=value)"),
        ("norms.x", "Invalid --hook-config format: 'norms.x' (expected hook_name.param=value)"),
        ("normsx=1", "Invalid --hook-config format: 'normsx=1' (expected hook_name.param=value)"),
        (".x=1", "Invalid --hook-config format: '.x=1' (expected hook_name.param=value)"),
        ("nrms.x=1", "Unknown hook: 'nrms'. Did you mean 'norms'?"),
        (
            "hessian.epsilon=1",
            "hessian is not among the hooks of this run (training_metrics, noted); add it: --hooks hessian.",
        ),
        ("noted.cuont=1", "Hook 'noted' takes no 'cuont'. Did you mean 'count'? It takes: count, scale"),
        ("noted.count=x", "--hook-config: expected a valid integer"),
        ("reference_weights.pth=x", "reference weights have a path, and nothing else"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(item, said, capsys, tmp_path):
    """Exit code 2, and no folder."""
    assert run_here("run", TINY, "--hooks", f"{EXPERIMENTS}:NotedHook", "--hook-config", item) == 2
    assert said in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_run_files_arguments_are_checked_and_flags_win(tmp_path, capsys):
    """The file's mistake has its line; the flag's value is the one that counts."""
    (tmp_path / "run.yaml").write_text(
        f"experiment: {TINY}\nhooks:\n  names: ['{EXPERIMENTS}:NotedHook']\n  config:\n    noted: {{count: x}}\n"
    )
    assert run_here("run", "run.yaml", "--epochs", "1", "--silent", "--no-report") == 2
    assert "line 5, at $.hooks.config.noted.count: expected a valid integer" in capsys.readouterr().err
    text = (tmp_path / "run.yaml").read_text().replace("count: x", "count: 4, scale: 2")
    (tmp_path / "run.yaml").write_text(text)
    flags = ("--epochs", "1", "--silent", "--no-report", "--hook-config", "noted.count=5")
    assert run_here("run", "run.yaml", *flags) == 0
    import experiments

    assert (experiments.NotedHook.made[-1]["count"], experiments.NotedHook.made[-1]["scale"]) == (5, 2.0)


def test_the_path_of_reference_weights_goes_through():
    """It is the manager's, which fills in the strategy."""
    run = Run(hooks={"config": {"reference_weights": {"path": "runs/{strategy}/x.pt"}}})
    assert build(run).options["reference_weights"] == "runs/{strategy}/x.pt"


@pytest.mark.parametrize(
    ("flags", "count"), [((), 6), (("--hook-config", "noted.count=5"), 5)], ids=["by itself", "a flag wins"]
)
def test_an_experiment_may_have_arguments_that_fit_it(flags, count, monkeypatch):
    """Only for hooks that were asked for, and what the user says wins."""
    import experiments

    given = {"noted": {"count": 6, "scale": 2.0}, "hessian": {"epsilon": 1.0}}
    monkeypatch.setattr(experiments.Tiny, "hook_config", given, raising=False)
    hook = ("--hooks", f"{EXPERIMENTS}:NotedHook")
    assert run_here("run", TINY, "--epochs", "1", "--silent", "--no-report", *hook, *flags) == 0
    assert (experiments.NotedHook.made[-1]["count"], experiments.NotedHook.made[-1]["scale"]) == (count, 2.0)
