"""How episodes ended, and the answer to a result that comes after the end.

Invariant: the first end of an episode stands; its repetition gets the same answer, anything else gets a conflict that
says precisely what happened instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from swarm.errors import ConflictError, NotFoundError, RequestError
from swarm.protocol import EpisodeEnd
from swarm.server.journal.rows import EndedHow, Ending

#: ended episodes remembered, so that a repeated end is answered like the first without asking the journal
MAX_REMEMBERED = 20_000

#: the code of an episode that the engine's next phase deleted
DELETED = "episode_deleted"

#: how -> code and words for a result that comes after it
TOO_LATE: dict[EndedHow, tuple[str, str]] = {
    "aborted": ("episode_aborted", "was aborted by its client"),
    "idle": ("episode_timed_out", "was idle for longer than its discard_episode_timeout and was taken back"),
    "capped": ("episode_expired", "ran for longer than its max_episode_seconds and was taken back"),
    "engine": (DELETED, "was deleted, because its batch left without it or another training run began"),
}


class Endings:
    """The last :data:`MAX_REMEMBERED` endings by episode."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._endings: OrderedDict[str, Ending] = OrderedDict()

    def remember(self, episode_uuid: str, ending: Ending) -> None:
        self._endings[episode_uuid] = ending
        while len(self._endings) > self._limit:
            self._endings.popitem(last=False)

    def get(self, episode_uuid: str) -> Ending | None:
        return self._endings.get(episode_uuid)


def check_unique(ends: Sequence[EpisodeEnd]) -> None:
    if len({end.episode_uuid for end in ends}) != len(ends):
        raise RequestError("an episode is named twice", param="ends")


def earlier_end(ending: Ending | None, client_uuid: str, episode_uuid: str, end_key: str) -> Ending:
    if ending is None or ending.client_uuid != client_uuid:
        raise unknown_error(episode_uuid)
    if ending.how == "ended":
        if end_key and ending.end_key and end_key != ending.end_key:
            raise ConflictError(
                f"episode {episode_uuid} was ended by another call: this result comes too late and is not counted",
                code="episode_ended",
            )
        return ending
    code, words = TOO_LATE[ending.how]
    raise ConflictError(f"episode {episode_uuid} {words}: its result came too late and is not counted", code=code)


def unknown_error(episode_uuid: str) -> NotFoundError:
    return NotFoundError(f"episode {episode_uuid} does not exist or is not yours", code="episode_not_found")
