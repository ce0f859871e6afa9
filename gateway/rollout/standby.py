"""Groups claimed ahead of the requests that will use them, so that no request waits for its claim.

Invariant: a group that was claimed here stays for at most :data:`KEEP_SECONDS` and is then handed to exactly one
request or given back; of each kind there are never more than were last wanted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.background import HEAD_START, Background
from swarm.client import EpisodeGroup
from swarm.errors import SwarmGatewayError

logger = logging.getLogger(__name__)

#: Longest stay of a group. Less than any episode may idle, and with it the slots of a route that rests come free.
KEEP_SECONDS = 30.0
#: Nothing is claimed ahead for so long after the server has refused.
_PAUSE = 1.0


@dataclass(frozen=True, slots=True)
class Kind:
    """What makes one group as good as another: its size, and how many seconds its episodes may idle."""

    count: int
    idle_seconds: float


class Standby:
    """The groups that one swarm server has given out ahead.

    Args:
        claim: gets a group of the kind on standby, or raises; bounded in time.
        give_back: aborts a group, in the background.
        background: runs the claims.
    """

    def __init__(
        self,
        claim: Callable[[Kind], Awaitable[EpisodeGroup]],
        give_back: Callable[[EpisodeGroup], None],
        background: Background,
    ) -> None:
        self._claim = claim
        self._give_back = give_back
        self._background = background
        #: by the name of their first episode, oldest first
        self._here: dict[Kind, OrderedDict[str, tuple[EpisodeGroup, asyncio.TimerHandle]]] = {}
        self._wanted: dict[Kind, int] = {}
        self._filling: set[Kind] = set()
        #: what was claimed before it last rose is good for nothing
        self._epoch = 0
        self._not_before = float("-inf")
        self._over = False

    def __len__(self) -> int:
        return sum(map(len, self._here.values()))

    def take(self, kind: Kind) -> EpisodeGroup | None:
        """The group that has been here longest, if there is one of the kind; the caller's from now on."""
        if not (here := self._here.get(kind)):
            return None
        _, (group, timer) = here.popitem(last=False)
        timer.cancel()
        return group

    def fill(self, kind: Kind, wanted: int) -> None:
        """See to it, behind, that ``wanted`` groups of the kind are here."""
        self._wanted[kind] = wanted
        while len(self._here.get(kind, ())) > wanted and (group := self.take(kind)) is not None:
            self._give_back(group)
        now = asyncio.get_running_loop().time()
        if not self._over and kind not in self._filling and self._lacks(kind) and now >= self._not_before:
            self._filling.add(kind)
            self._background.start(self._fill(kind), "claiming groups ahead")

    def release(self) -> None:
        """Give all back, also what is being claimed: the server, or the configuration, is not what it was."""
        self._epoch += 1
        for kind in list(self._here):
            while (group := self.take(kind)) is not None:
                self._give_back(group)
        self._here.clear()

    def close(self) -> None:
        """The same, and keep nothing from now on."""
        self._over = True
        self.release()

    def _lacks(self, kind: Kind) -> bool:
        return len(self._here.get(kind, ())) < self._wanted[kind]

    async def _fill(self, kind: Kind) -> None:
        try:
            await asyncio.sleep(HEAD_START)
            while self._lacks(kind) and not self._over:
                epoch = self._epoch
                group = await self._claim(kind)
                if epoch == self._epoch and self._lacks(kind):
                    self._keep(kind, group)
                else:
                    self._give_back(group)
        except SwarmGatewayError as exc:
            logger.debug("no group of %d is claimed ahead: %s", kind.count, exc.message)
            self._not_before = asyncio.get_running_loop().time() + _PAUSE
        finally:
            self._filling.discard(kind)

    def _keep(self, kind: Kind, group: EpisodeGroup) -> None:
        name = group[0].episode_uuid
        timer = asyncio.get_running_loop().call_later(KEEP_SECONDS, self._tired_of, kind, name)
        self._here.setdefault(kind, OrderedDict())[name] = group, timer

    def _tired_of(self, kind: Kind, name: str) -> None:
        group, _ = self._here[kind].pop(name)
        self._give_back(group)
