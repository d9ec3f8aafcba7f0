"""Name what comes with hookline: the experiments, each one short file to read and to begin from, and the usual hook.

The command line looks a name up here (``hookline run mod_arithmetic``), and imports the experiment only then.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ALWAYS", "EMBEDDED"]

ALWAYS: Final = "training_metrics"
"""The hook that every run has: loss, accuracy and learning rate."""

EMBEDDED: Final = {
    "mod_arithmetic": "hookline.training.mod_arithmetic:ModArithmetic",
    "digits": "hookline.training.digits:Digits",
}
"""Where each is, by name."""
