"""Policy ``first``: the first answer streams live, the others are sampled beside it, and all are judged behind."""

from __future__ import annotations

from gateway.fanout.ports import Link, Route
from gateway.forms import Decided, Incoming, Live


async def first(route: Route, incoming: Incoming, session: Link | None) -> Live | Decided:
    """Answer 0 of a group: live where a stream was asked for, else whole as soon as it is there.

    Arguments and errors as of :func:`gateway.fanout.best.best`; a failure after the first chunk ends the stream with
    an error.
    """
    raise NotImplementedError
