"""What a request says of itself as a retry: which others are the same, and whether its sender will ask again.

Invariant: two requests that an application sends on purpose at one time are never taken for one; see :class:`Mark`.

OpenAI's and Anthropic's SDKs number their attempts (``x-stainless-retry-count``) and tell their read timeout
(``x-stainless-read-timeout``; ``x-stainless-timeout``, in whole seconds, in those for JavaScript). They ask again after
0.5 s, doubling up to 8 s. An ``x-request-id`` marks no retry: applications send one for all calls of a task.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.limits.admission import Guarded
from gateway.types import Incoming

_RETRY_COUNT = "x-stainless-retry-count"
_TIMEOUTS = ("x-stainless-read-timeout", "x-stainless-timeout")
_IDEMPOTENCY = "idempotency-key"
#: Headers by which two equal bodies ask for different things.
_OURS = "x-swarm-"
_PAUSE_FIRST, _PAUSE_MOST = 0.5, 8.0
#: What a retry takes beyond its pause: a new connection, a loaded client.
_ON_THE_WAY = 2.0
#: A hang-up so close to the SDK's timeout is taken for it: our clock starts later, and theirs may be cut to seconds.
_EARLY, _EARLY_SHARE, _LATE = 1.0, 0.2, 2.0
_KEYED_GRACE = 5.0

Key = tuple[str, str, bytes | str]


@dataclass(frozen=True, slots=True)
class Mark:
    """How a request can be known again.

    Attributes:
        key: equal for what may be one request: the route, the caller, and its ``idempotency-key`` or its body.
        digest: of path, body, and headers that say how to answer.
        attempt: 0 for the first.
        keyed: an ``idempotency-key`` was sent: every request with it is the same one.
        timeout: seconds after which its sender gives up waiting, where it says so.
        rejoin: seconds that the route lets work wait for such a request to come again.
    """

    key: Key
    digest: bytes
    attempt: int
    keyed: bool
    timeout: float | None
    rejoin: float

    @classmethod
    def of(cls, incoming: Incoming, route: Guarded) -> Mark | None:
        """The mark of ``incoming``; ``None`` where no retry of it could be told from a new request."""
        headers = incoming.headers
        count, keyed = headers.get(_RETRY_COUNT), headers.get(_IDEMPOTENCY)
        rejoin = route.settings.rejoin_seconds
        if count is None and not keyed and not rejoin:
            return None
        digest = _digest(incoming)
        return cls(
            key=(route.name, incoming.caller.key_id, keyed or digest),
            digest=digest,
            attempt=int(count) if count is not None and count.isdecimal() else 0,
            keyed=bool(keyed),
            timeout=_timeout(headers),
            rejoin=rejoin,
        )

    def grace(self, waited: float) -> float:
        """Seconds for which a retry is to be expected of a sender who hung up after ``waited`` seconds.

        Who leaves at its own timeout asks again; who leaves at another moment has lost interest, and its samples are
        to be cancelled at once.
        """
        grace = self.rejoin
        if self.keyed:
            grace = max(grace, _KEYED_GRACE)
        if self.timeout is not None:
            early = min(_EARLY, self.timeout * _EARLY_SHARE)
            if self.timeout - early <= waited <= self.timeout + _LATE:
                pause = min(_PAUSE_FIRST * 2 ** min(self.attempt, 10), _PAUSE_MOST)
                grace = max(grace, pause + _ON_THE_WAY)
        return grace


def _digest(incoming: Incoming) -> bytes:
    digest = hashlib.sha256(incoming.raw)
    ours = sorted(item for item in incoming.headers.items() if item[0].startswith(_OURS))
    digest.update(repr((incoming.path, ours)).encode())
    return digest.digest()


def _timeout(headers: Mapping[str, str]) -> float | None:
    for name in _TIMEOUTS:
        try:
            seconds = float(headers[name])
        except (KeyError, ValueError):
            continue
        if 0 < seconds < float("inf"):
            return seconds
    return None
