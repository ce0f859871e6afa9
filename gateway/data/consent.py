"""Whether the texts of a request may be kept and trained: by its header, its key, its route, and what they hold; and
who said no once for all that comes: keys and sessions, in a file beside the gateway's keys.

Invariant: a no of the header or of the key holds, whatever else says yes; where nobody has said anything, the route
decides. Until that is known, nothing may be kept. A key's no for all is on disk before it is acknowledged, and holds at
each gateway that has the file, over restarts. So does a session's, but where there is no file, or it cannot be written:
then it holds until the gateway ends. Refusals have digests of the names of sessions, not the names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from swarm.concurrency import Latest
from swarm.credentials import exclusively, mark_of, read_private, replace_private
from swarm.errors import ConfigError, RequestError
from swarm.subjects import user_digest
from swarm.types import Model

logger = logging.getLogger(__name__)

#: What a route takes silence for: of ``opt_out`` for a yes, of ``opt_in`` for a no.
ConsentRule = Literal["opt_out", "opt_in"]
#: What becomes of a group with a private part: of ``none`` nothing else than of others, of ``group`` it is not kept; of
#: ``before_sampling`` alike, but its prompt has placeholders by then.
Redaction = Literal["none", "group", "before_sampling"]

TRAIN_HEADER = "x-swarm-train"
#: A no for all that is left of the session.
NO_SESSION = "false; session"
#: Sessions that are remembered, the latest; their file is then some 400 KB.
_MOST_SESSIONS = 10_000


class PrivacyRules(Protocol):
    """What is private; see ``redaction`` in :mod:`swarm.packs`."""

    def private(self, value: Any) -> bool:
        """Whether a text anywhere in ``value`` (JSON) has a private part."""
        ...


@dataclass(slots=True)
class Consent:
    """Of one request.

    Attributes:
        granted: whether its texts may be kept; no, until its route is known.
        rules: texts with parts that are private by them may not be kept all the same; ``None``: no rules.
    """

    granted: bool = False
    rules: PrivacyRules | None = None

    def keeps(self, texts: Any) -> bool:
        """Whether ``texts`` (JSON) may be kept."""
        return self.granted and not self.withholds(texts)

    def withholds(self, texts: Any) -> bool:
        """Whether what ``texts`` (JSON) hold forbids to keep them; rules cannot read a prompt of token ids."""
        prompt = cast("dict[str, Any]", texts).get("prompt") if isinstance(texts, dict) else None
        return self.rules is not None and (isinstance(prompt, list) or self.rules.private(texts))


def header_consent(headers: Mapping[str, str]) -> bool | None:
    """What ``x-swarm-train`` of ``headers`` (lower-case names) says; ``None``: nothing.

    Raises:
        RequestError: neither true, false, nor :data:`NO_SESSION`.
    """
    value = headers.get(TRAIN_HEADER)
    if value is None:
        return None
    if value.lower() not in ("true", "false", NO_SESSION):
        raise RequestError(f"{TRAIN_HEADER}: {value[:100]!r} is neither true nor false", param=TRAIN_HEADER)
    return value.lower() == "true"


def refusal_in(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """What ``x-swarm-train`` says where one of raw ``headers`` says no; else empty."""
    values = (value.decode("latin-1") for name, value in headers if name == TRAIN_HEADER.encode())
    return max((value for value in values if value.lower().startswith("false")), key=len, default="")


def consents(rule: ConsentRule, key: bool | None, header: bool | None) -> bool:
    """Whether texts may be kept, by the route's ``rule``, the caller's ``key`` and the ``header``."""
    if key is False or header is False:
        return False
    return rule == "opt_out" or key is True or header is True


class _Refused(Model):
    """``keys`` by their ids, ``sessions`` by digests of key and name, the latest last."""

    keys: list[str] = []
    sessions: list[str] = []


class Refusals:
    """The keys and sessions whose texts may not be kept.

    Args:
        path: of the file, which need not exist; ``None``: there is none.
        before: of the same gateway: what it heard holds on.

    Raises:
        ConfigError: the file is there and cannot be read.
    """

    def __init__(self, path: Path | None, before: Refusals | None = None) -> None:
        self._path = path
        self._mark = path and mark_of(path)
        self._writing = asyncio.Lock()
        self._complaint = ""
        #: what this gateway heard itself
        self._heard = Latest[str, None](_MOST_SESSIONS) if before is None else before._heard
        self._take(_Refused() if path is None else _read(path))

    def refuses(self, key_id: str, session: str = "") -> bool:
        """Whether this key, or this session of it, says no; an empty name is no session."""
        names = _digests(key_id, session) if session else ()
        return key_id in self._keys or any(name in self._heard or name in self._sessions for name in names)

    async def hear(self, key_id: str, session: str, headers: Mapping[str, str], own: str = "") -> bool:
        """Whether a request's key or session says no, by its ``headers`` or before; then so does ``own``, the session's
        name that a sub-agent has of its own: its sub-agents name that alone."""
        says_no = headers.get(TRAIN_HEADER, "").lower() == NO_SESSION
        refuses = self.refuses(key_id, session) or bool(session and says_no)
        for name in (session, own) if session and refuses else ():
            if name and not self.refuses(key_id, name):
                try:
                    await self.add(key_id, name)
                except ConfigError as exc:
                    logger.error("a session's no holds until this gateway ends, and here alone: %s", exc.message)
        return refuses

    async def add(self, key_id: str, session: str) -> None:
        """Note a no: of this session of the key, whatever the key if that is empty; without a session of the key.

        Raises:
            ConfigError: the file cannot be written.
        """
        keys = [] if session else [key_id]
        if session:
            self._heard[_digests(key_id, session)[0]] = None
        if (path := self._path) is not None:
            async with self._writing:
                # those of other requests too, which then find theirs written
                heard = [name for name in self._heard if name not in self._sessions]
                if keys or heard:
                    self._take(await asyncio.shield(asyncio.to_thread(_add, path, keys, heard)))

    async def refresh(self) -> None:
        """Read the file if it has changed; of one that is gone the last contents count, and one that cannot be read is
        read again at the next look."""
        # what was read before an addition may not be taken after it
        async with self._writing:
            # in a thread: the disk may hang
            await asyncio.to_thread(self._look)

    def _look(self) -> None:
        path = self._path
        if path is None or (mark := mark_of(path)) in (None, self._mark):
            return
        try:
            self._take(_read(path))
        except ConfigError as exc:
            if exc.message != self._complaint:
                logger.error("%s; whoever said no so far is heeded", exc.message)
            self._complaint = exc.message
        else:
            self._mark, self._complaint = mark, ""

    def _take(self, refused: _Refused) -> None:
        self._keys, self._sessions = frozenset(refused.keys), frozenset(refused.sessions)


def _digests(key_id: str, session: str) -> tuple[str, str]:
    """Of a session with this key, and with any."""
    return user_digest(f"{key_id}\n{session}"), user_digest(f"\n{session}")


def _read(path: Path) -> _Refused:
    return read_private(path, _Refused, "refusals")


def _add(path: Path, keys: Sequence[str], sessions: Sequence[str]) -> _Refused:
    with exclusively(path):
        old = _read(path)
        new = _Refused(
            keys=list(dict.fromkeys([*old.keys, *keys])),
            sessions=list(dict.fromkeys([*old.sessions, *sessions]))[-_MOST_SESSIONS:],
        )
        replace_private(path, new)
    return new
