"""What a server logs, ours and uvicorn's alike: one line on stderr with the time, the level and who says it."""

from __future__ import annotations

import logging

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OURS = ("gateway", "swarm", "reward_hooks", "adapters")


def log_to_stderr() -> None:
    """Once, before serving. Libraries speak up from warnings on: httpx would log every request."""
    from uvicorn.config import LOGGING_CONFIG

    logging.basicConfig(format=_FORMAT, level=logging.WARNING)
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    # uvicorn installs handlers of its own, from this, in every server it runs
    LOGGING_CONFIG["formatters"]["default"]["fmt"] = _FORMAT
