"""Flags made of the fields of a configuration class."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from hookline.cli.find_experiment import ConfigFlags


@dataclass
class Config:
    epochs: int = 3
    seed: int = 1
    fast: bool = False


def test_the_recipe_of_config_flags_runs():
    """Fields become flags with other defaults; a field of hookline's own takes the value of that flag."""
    flags = ConfigFlags(Config, flags={"seed"})
    values = tyro.cli(flags.dataclass({"epochs": 5}), args=["--fast"])
    assert flags.make(vars(values), {"seed": 3}) == Config(epochs=5, seed=3, fast=True)
    assert flags.make(vars(values), {"seed": None}).seed == 1
    assert flags.switch_defaults({"epochs": 5}) == {"fast": False}
