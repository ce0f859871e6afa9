"""One way to answer with a wire model."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from swarm.types import Model


def answer(model: Model, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``model`` as a JSON answer."""
    return Response(model.model_dump_json(), status, headers, media_type="application/json")
