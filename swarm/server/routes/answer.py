"""One way to answer with a wire model."""

from __future__ import annotations

from starlette.responses import Response

from swarm.types import Model


def answer(model: Model) -> Response:
    """``model`` as a JSON answer with status 200."""
    return Response(model.model_dump_json(), media_type="application/json")
