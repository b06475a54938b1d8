"""Requests made from the OpenAPI document, right ones and wrong ones: no server error, and answers as documented."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from quire.server.openai_api.openapi import document
from quire.server.routes import ROUTES
from tests.server.conftest import make_tokenizer
from tests.server.scripted import ScriptedEngine, running

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
          negative_data_rejection]
OPTIONS = settings(max_examples=20, deadline=None, derandomize=True,
                   suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much,
                                          HealthCheck.data_too_large, HealthCheck.function_scoped_fixture])


def schema(mode: GenerationMode) -> Any:
    found = schemathesis.openapi.from_dict(document(ROUTES, needs_key=False))
    found.config.generation.update(modes=[mode])
    return found


positive, negative = schema(GenerationMode.POSITIVE), schema(GenerationMode.NEGATIVE)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running(ScriptedEngine(make_tokenizer(), "Hello")) as (found, _):
        yield found


@positive.parametrize()
@OPTIONS
def test_right_requests_meet_no_server_error(case: Any, address: str) -> None:
    case.call_and_validate(base_url=address, checks=CHECKS)


@negative.parametrize()
@OPTIONS
def test_wrong_requests_are_refused_without_a_server_error(case: Any, address: str) -> None:
    case.call_and_validate(base_url=address, checks=CHECKS)
