"""The gateway's OpenAPI document: every route of its own is in it, and it is one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import jsonschema
import pytest
from starlette.routing import Route

from gateway.api.openapi import document
from gateway.api.operations import OPERATIONS
from gateway.api.routes import ANY_OTHER
from gateway.app import create_app
from gateway.config import GatewayConfig
from tests.gateway.conftest import write_hooks
from tests.swarm.http.references import references


def served(folder: Path) -> Iterator[tuple[str, str]]:
    for route in create_app(GatewayConfig(hooks=str(write_hooks(folder / "hooks")))).routes:
        assert isinstance(route, Route)
        path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
        if route.path != ANY_OTHER:
            yield from ((method, path) for method in (route.methods or set()) - {"HEAD"})


def test_every_route_of_the_app_is_in_the_table(tmp_path: Path) -> None:
    assert set(served(tmp_path)) == {(one.method, one.path) for one in OPERATIONS}
    assert len(OPERATIONS) == len({(one.method, one.path) for one in OPERATIONS})


def test_the_document_holds_together() -> None:
    schemas = document()["components"]["schemas"]
    for reference in set(references(document())):
        assert re.fullmatch(r"#/components/schemas/[\w-]+", reference) and reference.rpartition("/")[2] in schemas
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    operations = [operation for path in document()["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) == len(OPERATIONS)


@pytest.mark.anyio
async def test_it_is_served(gateway: httpx.AsyncClient) -> None:
    answer = await gateway.get("/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json() == document()
    assert "security" not in answer.json()["paths"]["/health"]["get"]
    assert answer.json()["paths"]["/v1/chat/completions"]["post"]["security"] == [{"key": []}, {}]
