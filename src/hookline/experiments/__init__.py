"""Experiments that come with hookline: each is one short file of building blocks, to run, to read, to begin from.

Asked by the command line: ``hookline run mod_arithmetic``. Nothing is imported until one is asked for.
"""

from __future__ import annotations

from typing import Final

__all__ = ["EMBEDDED"]

EMBEDDED: Final = {
    "mod_arithmetic": "hookline.experiments.mod_arithmetic:ModArithmetic",
    "digits": "hookline.experiments.digits:Digits",
}
"""Where each is, by name."""
