"""Requests that replicas die of: who was in flight at a death, who is sampled alone, and who is refused.

Invariant: a request is refused only after a death at which no other request was in flight at its replica, and which was
at least its second. So a request that is in flight at deaths by chance is never refused, however many they are, unless
a replica dies by itself just while that request is alone there.

Those in flight at a death are suspects. A suspect is sampled alone: it waits until its replica is empty, and all others
wait until it has ended. An answer clears it. The others wait for at most :data:`ALONE_SECONDS`, twice as long after
each further death of the same suspect, so that a long answer does not keep them waiting, and a request that takes long
to kill is found all the same; and for all suspects that come back together for at most :data:`MOST_WAITED` seconds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from adapters.dialects.jsons import encode
from swarm.concurrency import Latest
from swarm.errors import FatalRequestError
from swarm.files import replace_file
from swarm.tokens import EARLIER_IDS

logger = logging.getLogger(__name__)

#: How long others wait for a suspect of one death, in seconds.
ALONE_SECONDS = 30.0
#: Seconds for which the others wait for suspects that come back together, however many these are.
MOST_WAITED = 120.0
#: Suspects that are remembered.
_MOST_SUSPECTS = 10_000
#: Fields in which one request differs when it is sent again: the form of its answer, and what the gateway adds.
_NOT_THE_REQUEST = frozenset(
    {
        "model",
        "n",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "return_token_ids",
        "include_reasoning",
        "request_id",
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        EARLIER_IDS,
    }
)


class Identity:
    """What tells one request from others.

    Args:
        model: of the job; another model may live through the same request.
        body: as the caller sent it, in the form of a chat, of a raw prompt, or of another call of vLLM's.
    """

    def __init__(self, model: str, body: Mapping[str, Any]) -> None:
        self.model = model
        self.body = body

    @cached_property
    def digest(self) -> str:
        """The same for each try of the request. It is computed where a replica has died only."""
        fields = sorted((name, value) for name, value in self.body.items() if name not in _NOT_THE_REQUEST)
        return blake2b(encode([self.model, fields]), digest_size=16).hexdigest()


class Suspects:
    """The suspects of one swarm server, and the requests that it refuses.

    Args:
        folder: keeps a file per refused request, without its text; while the file is there, the request is refused,
            also by the next server. ``None``: nothing is kept.
        refused: called with the deaths that a request explains once it is refused.
    """

    def __init__(self, folder: Path | None = None, *, refused: Callable[[int], None] = lambda deaths: None) -> None:
        self._folder = folder
        self._tell = refused
        #: deaths of each suspect, by digest
        self._deaths = Latest[str, int](_MOST_SUSPECTS)
        self._refused: dict[str, Path | None] = {}
        if folder is not None and folder.is_dir():
            self._refused = {path.stem: path for path in folder.glob("*.json")}

    def __len__(self) -> int:
        """How many requests are suspected."""
        return len(self._deaths)

    def deaths_of(self, identity: Identity) -> int:
        """At how many deaths a suspect was in flight; 0: it is none."""
        return self._deaths.get(identity.digest, 0) if self._deaths else 0

    def check(self, identity: Identity) -> None:
        """Raise :class:`FatalRequestError` for a request that is refused."""
        if not self._refused or identity.digest not in self._refused:
            return
        path = self._refused[identity.digest]
        if path is not None and not path.exists():
            logger.info("the request %s is allowed again: its file was removed", identity.digest)
            del self._refused[identity.digest]
            return
        raise FatalRequestError(
            "the engine dies of this request each time that it samples for it, so the request is refused: do not send "
            f"it again. Whoever runs the swarm server finds it as refused/{identity.digest}.json in the run folder; "
            "removing that file allows the request again"
        )

    def died(self, in_flight: Iterable[Identity]) -> None:
        """A replica died while it worked on these."""
        suspects = {identity.digest: identity for identity in in_flight}
        for digest in suspects:
            self._deaths[digest] = self._deaths.get(digest, 0) + 1
        if len(suspects) == 1:
            [(digest, identity)] = suspects.items()
            if self._deaths[digest] > 1:
                self._refuse(identity, self._deaths.pop(digest))
        elif suspects:
            logger.warning("a replica died with %d requests in flight: each is sampled alone next time", len(suspects))

    def cleared(self, identity: Identity) -> None:
        """The request has its answer."""
        if self._deaths:
            self._deaths.pop(identity.digest, None)

    def _refuse(self, identity: Identity, deaths: int) -> None:
        logger.error(
            "the engine died %d times of the request %s, the last time with no other request in flight: it is refused",
            deaths,
            identity.digest,
        )
        self._refused[identity.digest] = None
        if self._folder is not None:
            path = self._folder / f"{identity.digest}.json"
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                record = {
                    "digest": identity.digest,
                    "refused_at": datetime.now(UTC).isoformat(timespec="seconds"),
                    "model": identity.model,
                    "deaths": deaths,
                    "fields": {name: _without_text(value) for name, value in identity.body.items()},
                }
                replace_file(path, json.dumps(record, indent=1).encode())
                self._refused[identity.digest] = path
            except OSError as exc:
                logger.error("the record %s cannot be written: %s", path, exc.strerror or exc)
        self._tell(deaths)


@dataclass(eq=False)
class Arrival:
    """A call at a replica's door: waiting, or ``inside``, which is in flight."""

    identity: Identity
    inside: bool = False


@dataclass
class Door:
    """Decides when calls may go to one replica."""

    suspects: Suspects
    _arrivals: dict[Arrival, None] = field(default_factory=dict[Arrival, None])
    #: by digest of a suspect: when (on the caller's clock) the others need not wait for it any more
    _until: dict[str, float] = field(default_factory=dict[str, float])
    #: when the first of these suspects had its turn
    _since: float = 0.0

    def arrive(self, identity: Identity) -> Arrival:
        """One more call, which waits."""
        arrival = Arrival(identity)
        self._arrivals[arrival] = None
        return arrival

    def admits(self, arrival: Arrival, now: float) -> bool:
        """Whether the call may go to the replica now, in which case it is inside."""
        arrival.inside = not self.suspects or self._turn_of(arrival, now)
        return arrival.inside

    def leave(self, arrival: Arrival) -> None:
        """The call is over, or does not wait any more."""
        self._arrivals.pop(arrival, None)
        if self._until:
            here = {arrival.identity.digest for arrival in self._arrivals}
            self._until = {digest: until for digest, until in self._until.items() if digest in here}

    def inside(self) -> Collection[Identity]:
        """The requests in flight."""
        return [arrival.identity for arrival in self._arrivals if arrival.inside]

    def opens(self, now: float) -> float | None:
        """When another call may be admitted although nobody leaves; ``None``: never."""
        return min((until for until in self._until.values() if until > now), default=None)

    def _turn_of(self, arrival: Arrival, now: float) -> bool:
        alone = self._alone(now)
        mine = arrival.identity.digest
        if alone is None or self._until.get(mine, now + 1) <= now:
            return True
        return mine == alone and all(arrival.identity.digest == mine for arrival in self._arrivals if arrival.inside)

    def _alone(self, now: float) -> str | None:
        """The suspect that the others wait for: the first that has arrived and has not had its time; none once all of
        them together have waited :data:`MOST_WAITED` seconds."""
        if self._until and now > self._since + MOST_WAITED:
            return None
        for arrival in self._arrivals:
            if deaths := self.suspects.deaths_of(arrival.identity):
                digest = arrival.identity.digest
                if not self._until:
                    self._since = now
                if now < self._until.setdefault(digest, now + ALONE_SECONDS * 2 ** min(deaths - 1, 20)):
                    return digest
        return None


def _without_text(value: Any) -> Any:
    """A number or a switch as it is; of anything else how large it is."""
    if value is None or isinstance(value, bool | int | float):
        return value
    size: dict[str, Any] = {"type": type(value).__name__, "bytes": len(encode(value))}
    return size | {"items": len(value)} if isinstance(value, list | dict) else size
