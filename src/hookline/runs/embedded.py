"""List the experiments that come with hookline: each is one short file to run, to read, to begin from.

The command line looks a name up here (``hookline run mod_arithmetic``), and imports the experiment only then.
"""

from __future__ import annotations

from typing import Final

__all__ = ["EMBEDDED"]

EMBEDDED: Final = {
    "mod_arithmetic": "hookline.training.mod_arithmetic:ModArithmetic",
    "digits": "hookline.training.digits:Digits",
}
"""Where each is, by name."""
