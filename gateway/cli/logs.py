"""What a server logs, ours and uvicorn's alike: one line on stderr with the time, the level and who says it."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

import typer

_OURS = ("gateway", "swarm", "reward_hooks", "adapters")


LogFormat = Annotated[
    Literal["text", "json"], typer.Option(help="json: one object a line, with the request it is about")
]


def log_to_stderr(form: Literal["text", "json"] = "text", *, texts: bool = False) -> None:
    """Once, before serving. Libraries speak up from warnings on: httpx would log every request.

    Args:
        form: lines of text, or one JSON object a line.
        texts: whether errors are told in their own words, which may quote a prompt.
    """
    from uvicorn.config import LOGGING_CONFIG

    from gateway.observability.logs import JsonFormatter, TextFormatter

    kind = JsonFormatter if form == "json" else TextFormatter
    handler = logging.StreamHandler()
    handler.setFormatter(kind(texts=texts))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    # uvicorn installs handlers of its own, from this, in every server it runs
    LOGGING_CONFIG["formatters"]["default"] = {"()": kind, "texts": texts}
