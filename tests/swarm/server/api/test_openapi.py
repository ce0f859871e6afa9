"""The OpenAPI document: every route is in it, and it is one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import jsonschema
import pytest
from starlette.routing import BaseRoute, Mount, Route

from swarm.protocol import ClaimEpisodeRequest
from swarm.server.api.openapi import document
from swarm.server.api.operations import OPERATIONS
from swarm.server.app import create_app
from swarm.server.auth.scopes import ROUTE_SCOPES, WITHOUT_TOKEN
from swarm.server.config import ServerConfig
from swarm.server.metering import route_of
from tests.swarm.http.references import references
from tests.swarm.server.conftest import Rig


def served(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    for route in routes:
        if isinstance(route, Mount):
            yield from served(route.routes)
        elif isinstance(route, Route):
            yield from ((method, route.path_format) for method in (route.methods or set()) - {"HEAD"})


def test_every_route_of_the_app_is_in_the_table(tmp_path: Path) -> None:
    app = create_app(ServerConfig(run_dir=tmp_path))
    assert set(served(app.routes)) == {(one.method, one.path) for one in OPERATIONS}
    assert len(OPERATIONS) == len({(one.method, one.path) for one in OPERATIONS})


def test_every_control_route_has_a_scope_of_its_own() -> None:
    control = {one.path for one in OPERATIONS if not one.path.startswith(WITHOUT_TOKEN)}
    assert control <= set(ROUTE_SCOPES)
    assert all((one.key == "token") == (one.path in control) for one in OPERATIONS)


def test_the_document_holds_together() -> None:
    whole = document()
    assert whole["openapi"].startswith("3.1")
    schemas = whole["components"]["schemas"]
    for reference in set(references(whole)):
        assert re.fullmatch(r"#/components/schemas/[\w-]+", reference) and reference.rpartition("/")[2] in schemas
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    operations = [operation for path in whole["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) == len(OPERATIONS)
    for operation in operations:
        assert "200" in operation["responses"]


def test_what_a_route_takes_is_what_its_document_says() -> None:
    body = document()["paths"]["/claim_episode"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ClaimEpisodeRequest"}
    schema = document()["components"]["schemas"]["ClaimEpisodeRequest"]
    assert set(schema["properties"]) == set(ClaimEpisodeRequest.model_fields)
    assert schema["properties"]["wait_seconds"]["maximum"] == 60


def test_scopes_are_in_the_document() -> None:
    paths = document()["paths"]
    assert paths["/claim_group"]["post"]["security"] == [{"token": ["claim"]}, {}]
    assert paths["/start_engine"]["post"]["security"] == [{"token": ["admin"]}, {}]
    assert paths["/episodes/{episode_uuid}/v1/models"]["get"]["security"] == [{"episode": []}]
    assert "security" not in paths["/health"]["get"]


@pytest.mark.anyio
async def test_it_is_served(rig: Rig) -> None:
    answer = await rig.client.get("/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json() == document()


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/claim_episode", "/claim_episode"),
        ("/episodes/abc/v1/chat/completions", "/episodes/{episode_uuid}/v1/chat/completions"),
        ("/groups/abc/v1/models", "/groups/{group_uuid}/v1/models"),
        ("/episodes/abc/v1/secret", "other"),
        ("/episodes//v1/models", "/episodes/{episode_uuid}/v1/models"),
        ("/episodes", "other"),
        ("/nonsense", "other"),
        ("/", "other"),
        ("", "other"),
    ],
)
def test_a_path_is_counted_under_its_route(path: str, route: str) -> None:
    assert route_of(path) == route
