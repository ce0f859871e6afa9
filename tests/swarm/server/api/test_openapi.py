"""The OpenAPI document: every route is in it, and it is valid."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
from starlette.routing import Route

from swarm.protocol import ClaimEpisodeRequest
from tests.swarm.http.references import references
from tests.swarm.server.conftest import Rig

pytestmark = pytest.mark.anyio


async def test_every_route_is_in_the_document_with_what_it_takes_and_needs(rig: Rig) -> None:
    answer = await rig.client.get("/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    whole: dict[str, Any] = answer.json()
    assert whole["openapi"].startswith("3.1")
    schemas = whole["components"]["schemas"]
    for reference in set(references(whole)):
        assert re.fullmatch(r"#/components/schemas/[\w-]+", reference) and reference.rpartition("/")[2] in schemas
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    served = {
        (method.lower(), route.path_format)
        for route in rig.app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(method, path) for path, methods in whole["paths"].items() for method in methods} == served
    operations = [operation for path in whole["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all("200" in operation["responses"] for operation in operations)
    assert [operation["operationId"] for operation in operations if not operation.get("summary")] == []
    for path, method, media_type in [
        ("/v1/chat/completions", "post", "application/json"),
        ("/tokenize", "post", "application/json"),
        ("/metrics", "get", "text/plain"),
    ]:
        answered = whole["paths"][path][method]["responses"]["200"]["content"][media_type]
        assert "schema" in answered, f"{path}: a generated client drops an answer without a schema"

    claim = whole["paths"]["/claim_episode"]["post"]
    assert claim["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/ClaimEpisodeRequest"
    }
    schema = schemas["ClaimEpisodeRequest"]
    assert set(schema["properties"]) == set(ClaimEpisodeRequest.model_fields)
    assert schema["properties"]["wait_seconds"]["maximum"] == 60
    assert claim["security"] == [{"token": ["claim"]}, {}]
    asked = {parameter["name"]: parameter for parameter in whole["paths"]["/status"]["get"]["parameters"]}
    assert set(asked) == {"wait_state", "after_change", "wait_seconds", "steps", "episodes"}
    assert (asked["wait_state"]["in"], asked["wait_state"]["schema"]["type"]) == ("query", "array")
    assert asked["wait_seconds"]["schema"]["maximum"] == 60
    assert not asked["steps"]["required"]
    [incumbent] = [row for row in whole["paths"]["/policies/explain"]["get"]["parameters"] if row["name"] != "of"]
    assert incumbent["description"] == "empty: the route's only one, or the latest version"
    path = whole["paths"]["/code/{id}"]["get"]["parameters"]
    assert path == [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    assert whole["paths"]["/start_engine"]["post"]["security"] == [{"token": ["admin"]}, {}]
    assert whole["paths"]["/episodes/{episode_uuid}/v1/models"]["get"]["security"] == [{"episode": []}]
    assert "security" not in whole["paths"]["/health"]["get"]
