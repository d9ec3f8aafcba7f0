"""The description of the API is true: what it allows is answered as it says, what it forbids is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from helpers_http import BEARER, served
from helpers_serve import tiny_llama
from hypothesis import HealthCheck, Phase, given, settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that schemathesis brings along
    import schemathesis
    from schemathesis.core.failures import FailureGroup
    from schemathesis.specs.openapi.checks import positive_data_acceptance

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning"),
]

EXAMPLES = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tiny_llama(tmp_path_factory.mktemp("described") / "tiny", length=64)
    # A forbidden body may have 120 KB: it has to reach the validator, not the limit of bytes, which answers with 413.
    with served(folder, settings={"export_dir": tmp_path_factory.mktemp("exports"), "max_body": 1_000_000}) as found:
        yield found


ROUTES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/hooks"),
    ("POST", "/hooks"),
    ("DELETE", "/hooks/{id}"),
    ("GET", "/modules"),
    ("GET", "/health"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def described(server: Any) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_route_is_described(server: Any) -> None:
    """What the test below goes through is all there is."""
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {(method.upper(), path) for path in paths for method in paths[path]} == set(ROUTES)


FITTING, FORBIDDEN = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
# A route that takes no body has nothing that could be forbidden.
CASES = [(*route, FITTING) for route in ROUTES] + [(*route, FORBIDDEN) for route in ROUTES if route[0] == "POST"]


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_a_route_does_what_its_description_says(described: Any, method: str, path: str, mode: Any) -> None:
    """Bodies that fit it and bodies that do not: no 500, a documented status and type; what is forbidden is
    refused. That everything which fits is accepted is not claimed: the names of layers are the model's own."""
    _go_through(described[path][method], mode)


def test_a_description_that_is_not_true_would_be_found_out(server: Any) -> None:
    """The other way round: without its errors, the route that removes hooks fails the test above."""
    found = server.client.get("/openapi.json").json()
    del found["paths"]["/hooks/{id}"]["delete"]["responses"]["4XX"]
    untrue = schemathesis.openapi.from_dict(found)
    untrue.config.update(base_url=server.url)
    with pytest.raises(FailureGroup) as caught:
        _go_through(untrue["/hooks/{id}"]["DELETE"], FITTING)
    assert "Received: 404" in str(caught.value.exceptions[0])


def _go_through(operation: Any, mode: Any) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def holds(case: Any) -> None:
        case.call_and_validate(headers=BEARER, excluded_checks=[positive_data_acceptance])

    holds()
