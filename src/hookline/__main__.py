"""``python -m hookline`` is ``hookline``."""

from __future__ import annotations

import sys

from hookline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
