"""How one request is to be answered: its route's settings, and what the request's own headers say instead.

Invariant: a request without headers of its own gets exactly what its route is set to; a header that means nothing is
refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gateway.config import RouteSettings

Kind = Literal["best", "first"]


@dataclass(frozen=True, slots=True)
class Policy:
    """How one request is answered.

    Attributes:
        kind: ``best``: judge, then answer; ``first``: answer 0 streams live and all are judged behind.
        quorum: of ``best``: judge as soon as so many answers are there; ``None``: all.
        deadline: of ``best``: judge what is there after so many seconds; ``None``: no such deadline.
        train: ``False``: no group at all, one answer straight from the engine; ``None``: as the route's
            ``train_fraction`` falls.
    """

    kind: Kind = "best"
    quorum: int | None = None
    deadline: float | None = None
    train: bool | None = None

    @classmethod
    def of(cls, settings: RouteSettings, headers: Mapping[str, str]) -> Policy:
        """What ``settings`` say, changed by ``x-swarm-policy`` and ``x-swarm-train`` of ``headers`` (lower-case names).

        ``x-swarm-policy`` is ``best``, ``first``, or ``best`` with what it waits for: ``best;quorum=4``,
        ``best;deadline=2.5``, both; a header replaces all that the route says of the policy.

        Raises:
            RequestError: a value that means nothing; ``param`` names the header.
        """
        raise NotImplementedError
