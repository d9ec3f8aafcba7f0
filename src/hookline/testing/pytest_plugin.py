"""Give pytest the fixture ``no_leaked_hooks``: a test that leaves hooks behind fails.

pytest loads this by an entry point. It imports no torch, and does nothing in tests that do not ask for the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch import nn


@pytest.fixture
def no_leaked_hooks(request: pytest.FixtureRequest) -> Iterator[Callable[[nn.Module], nn.Module]]:
    """Fail a test that leaves hooks behind, of anybody.

    Recipe::

        def test_my_hooks(no_leaked_hooks):
            model = no_leaked_hooks(make_model())  # looked at when the test is over
            ...

    Looked at are models that outlive the test, the models given to the fixture, and hooks of the whole process: on
    functions, operators, every module, every optimizer. What was there before the test is left alone. Of a test that
    has failed already nothing is said.
    """
    from hookline.testing.leaked_hooks import HookLedger

    ledger, failed = HookLedger(), request.session.testsfailed
    yield ledger.look_at
    if request.session.testsfailed == failed:
        ledger.check()
