"""How one request is to be answered: its route's settings, and what the request's own headers say instead.

Invariant: a request without headers of its own gets exactly what its route is set to; a header that means nothing is
refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NoReturn

from gateway.config import RouteSettings
from swarm.errors import RequestError

Kind = Literal["best", "first"]

POLICY_HEADER, TRAIN_HEADER = "x-swarm-policy", "x-swarm-train"
_LONGEST_DEADLINE = 3600.0


@dataclass(frozen=True, slots=True)
class Policy:
    """How one request is answered.

    Attributes:
        kind: ``best``: judge, then answer; ``first``: answer 0 streams live and all are judged behind.
        quorum: of ``best``: judge as soon as so many answers are there; ``None``: all.
        deadline: of ``best``: judge what is there so many seconds after sampling began; ``None``: no such deadline.
        train: whether a group is sampled at all; ``None``: as the route's ``train_fraction`` falls.
    """

    kind: Kind = "best"
    quorum: int | None = None
    deadline: float | None = None
    train: bool | None = None

    @classmethod
    def of(cls, settings: RouteSettings, headers: Mapping[str, str]) -> Policy:
        """What ``settings`` say, changed by ``x-swarm-policy`` and ``x-swarm-train`` of ``headers`` (lower-case names).

        ``x-swarm-policy`` is ``best``, ``first``, or ``best`` with what it waits for: ``best;quorum=4``,
        ``best;deadline=2.5``, both. It replaces all that the route says of the policy.

        Raises:
            RequestError: a value that means nothing; ``param`` names the header.
        """
        train = _train(headers.get(TRAIN_HEADER))
        given = headers.get(POLICY_HEADER)
        if given is None:
            return cls(settings.policy, settings.quorum, settings.answer_deadline_seconds, train)
        name, *options = [part.strip() for part in given.split(";")]
        if name == "first" and not options:
            return cls("first", train=train)
        if name != "best":
            _refuse(given)
        quorum: int | None = None
        deadline: float | None = None
        for option in options:
            key, _, value = option.partition("=")
            if key == "quorum" and quorum is None and value.isascii() and value.isdigit() and int(value) > 0:
                quorum = int(value)
            elif key == "deadline" and deadline is None:
                deadline = _seconds(value, given)
            else:
                _refuse(given)
        return cls("best", quorum, deadline, train)

    def trains(self, settings: RouteSettings, route: str, request_id: str) -> bool:
        """Whether this request fans out and trains; a group of one has nothing to learn from.

        The share of ``train_fraction`` is drawn by the request's id, so that all gateways, and a repetition under the
        same id, decide alike."""
        if settings.num_repeat == 1:
            return False
        if self.train is not None:
            return self.train
        drawn = blake2b(request_id.encode(errors="replace"), key=route.encode()[:64], digest_size=7)
        return int.from_bytes(drawn.digest()) / 2**56 < settings.train_fraction


def _train(value: str | None) -> bool | None:
    if value is None:
        return None
    if value.lower() not in ("true", "false"):
        raise RequestError(f"{TRAIN_HEADER}: {value[:100]!r} is neither true nor false", param=TRAIN_HEADER)
    return value.lower() == "true"


def _seconds(value: str, given: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        _refuse(given)
    if not (math.isfinite(seconds) and 0 < seconds <= _LONGEST_DEADLINE):
        _refuse(given)
    return seconds


def _refuse(given: str) -> NoReturn:
    raise RequestError(
        f"{POLICY_HEADER}: {given[:100]!r} is not 'best', 'first', or 'best' with ';quorum=<answers>' or "
        "';deadline=<seconds>'",
        param=POLICY_HEADER,
    )
