"""Judgements: what people who looked at a group said of its answers, as feedback that trains while the group is open,
and as evidence of how good the hook is.

Invariant: a judgement is kept with who judged and when, also when it comes too late to train; of one person and group
the last counts. Who undoes takes it out of the training, if that is still possible, and out of the evidence.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field

from gateway.observability.request_log import Erasure
from gateway.observability.scrubbing import text_without_secrets
from gateway.page.kept_groups import MOST_TEXT, KeptGroup
from gateway.sessions.conversation import heard
from reward_hooks import Feedback
from swarm.concurrency import Latest
from swarm.credentials import append_private
from swarm.errors import ConflictError, NotFoundError, RequestError
from swarm.intervals import wilson_interval
from swarm.types import Model, Notes

logger = logging.getLogger(__name__)

#: What a line must have, and what says whose data it is.
_WHOLE = {"group", "who", "route", "pick", "hook_best", "answers"}
_NAMES = ("request_id", "key", "session", "user")
#: Judgements that the figures are of, and bytes of their file that are read at the start.
_MOST_JUDGEMENTS, _MOST_BYTES = 10_000, 16 * 1024 * 1024


class GivenJudgement(Model):
    """``pick``: the index of the best answer; ``null``: none of them is good. ``correction`` is what the picked answer
    should have been; ``blind``: rewards were hidden."""

    pick: int | None = Field(default=None, ge=0)
    comment: str = Field(default="", max_length=10_000)
    correction: str = Field(default="", max_length=MOST_TEXT)
    blind: bool = False

    def feedback(self, indices: list[int]) -> dict[int, Feedback]:
        """For the hook, by index: the picked answer is rated 1, and the others 0; -1 each where none is good. A
        corrected answer was edited."""
        if self.pick is None:
            return {index: Feedback(rating=-1.0, comment=self.comment) for index in indices}
        signals = {"edited": 1.0} if self.correction else {"accepted": 1.0}
        others = {index: Feedback(rating=0.0) for index in indices}
        picked = Feedback(rating=1.0, comment=self.comment, better=self.correction, signals=signals)
        return {**others, self.pick: picked}


class Judgements:
    """All judgements of one gateway.

    Args:
        path: of the file that keeps them; ``None``: nothing does.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        #: by group and person
        self._latest = Latest[tuple[str, str], dict[str, Any]](_MOST_JUDGEMENTS)
        self._writing = asyncio.Lock()
        for line in _lines(path) if path is not None else ():
            self._note(line)

    async def judge(self, group: KeptGroup, who: str, judgement: GivenJudgement) -> dict[str, Any]:
        """Take a judgement; returns what is kept of it.

        Raises:
            RequestError: the group has no answer of that index.
            ConflictError: nobody could write it down; then it does not count.
            NotFoundError: what is kept of the group was deleted meanwhile.
        """
        if judgement.pick is not None and judgement.pick not in group.answers:
            raise RequestError("the group has no such answer", param="pick")
        best, pick = [] if group.knew else group.best, judgement.pick
        words = {
            "comment": text_without_secrets(judgement.comment),
            "correction": text_without_secrets(judgement.correction),
        }
        figures = {"trains": group.open, "answers": len(group.answers), "hook_best": best}
        entry = await self._keep(group, who, {**judgement.model_dump(), **words, **figures})
        if entry["trains"] and not group.open:
            # it closed while this was written
            entry = {**entry, "trains": False}
            with suppress(ConflictError):
                await self._keep(group, who, entry)
        group.picks[who] = {**entry, "agrees": None if pick is None or not best else pick in best}
        _apply(group)
        return group.picks[who]

    async def undo(self, group: KeptGroup, who: str) -> None:
        """Take back the judgement of ``who``.

        Raises:
            RequestError: there is none.
            ConflictError: nobody could write it down.
        """
        if who not in group.picks:
            raise RequestError("you have not judged this group", code="nothing_to_undo")
        await self._keep(group, who, {"undone": True})
        _apply(group)

    def agreement(self, opens: Callable[[str], bool]) -> dict[str, Any]:
        """How often people pick an answer that the hook likes best, with Wilson's interval at 95 %, and how often they
        would by chance; of groups whose rewards differ, on the routes that ``opens`` names. Each group counts once."""
        judged = [entry for entry in self._latest.values() if opens(entry["route"])]
        counted = [entry for entry in judged if entry["pick"] is not None and entry["hook_best"]]
        groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for entry in counted:
            groups[entry["group"]].append(entry)
        hits = sum(fmean(entry["pick"] in entry["hook_best"] for entry in of) for of in groups.values())
        chance = sum(fmean(len(entry["hook_best"]) / entry["answers"] for entry in of) for of in groups.values())
        share, low, high = wilson_interval(hits, len(groups), 0.95)
        return {
            "judged": len(judged),
            "compared": len(groups),
            "share": share if groups else None,
            "low": low,
            "high": high,
            "chance": chance / len(groups) if groups else None,
        }

    async def erase(self, fits: Callable[[Notes], bool]) -> int:
        """Delete the judgements of requests whose notes fit; how many lines there were, in the file if there is one.

        Raises:
            OSError: the file cannot be rewritten.
        """

        def fit(entry: dict[str, Any]) -> bool:
            return fits(Notes(**{name: entry.get(name, "") for name in _NAMES}))

        async with self._writing:
            gone = [name for name, entry in self._latest.items() if fit(entry)]
            for name in gone:
                del self._latest[name]
            if self._path is None:
                return len(gone)
            erasure = Erasure(lambda entry, _: fit(entry))
            await asyncio.shield(asyncio.to_thread(erasure.run, [self._path]))
            return erasure.lines.result()

    def _note(self, entry: dict[str, Any]) -> None:
        name = entry["group"], entry["who"]
        if entry.get("undone"):
            self._latest.pop(name, None)
        else:
            # their texts are the group's
            self._latest[name] = {field: entry[field] for field in (*_WHOLE, *_NAMES) if field in entry}

    async def _keep(self, group: KeptGroup, who: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Write a line down, which takes the place of what ``who`` said before; returns it.

        Raises:
            ConflictError: nobody could write it down.
            NotFoundError: what is kept of the group was deleted meanwhile.
        """
        named = {name: getattr(group.notes, name) for name in _NAMES}
        whose = {"when": datetime.now(UTC).isoformat(), "who": who, "group": group.id, "route": group.route}
        entry, path = {**whose, **named, **fields}, self._path

        def write() -> None:
            if path is not None and not group.erased:
                path.parent.mkdir(parents=True, exist_ok=True)
                append_private(path, entry)

        try:
            async with self._writing:
                await asyncio.shield(asyncio.to_thread(write))
        except OSError as exc:
            logger.error("a judgement is not kept: %s: %s", path, exc.strerror)
            raise ConflictError(f"the judgement cannot be kept ({exc.strerror}), so it does not count") from exc
        if group.erased:
            raise NotFoundError("what was kept of this group is deleted", code="group_not_found")
        self._note(entry)
        group.picks.pop(who, None)
        return entry


def _apply(group: KeptGroup) -> None:
    """Have the hook see the latest judgement, if the group is open."""
    if group.turn is None or not group.turn.open:
        return
    group.turn.judgements = {}
    for latest in list(group.picks.values())[-1:]:
        judgement = GivenJudgement.model_validate({name: latest[name] for name in GivenJudgement.model_fields})
        rated = judgement.feedback(list(group.answers))
        group.turn.judgements = {index: heard(feedback, group.turn.rules) for index, feedback in rated.items()}


def _lines(path: Path) -> list[dict[str, Any]]:
    """The entries of a file of judgements; of a long one the last. A line that is none is left out."""
    try:
        with path.open("rb") as reader:
            reader.seek(max(0, path.stat().st_size - _MOST_BYTES))
            lines = reader.read().splitlines()
    except FileNotFoundError:
        return []
    except OSError as exc:
        logger.error("the judgements of %s cannot be read: %s", path, exc.strerror)
        return []
    entries: list[dict[str, Any]] = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and ({"group", "who", "undone"} <= entry.keys() or entry.keys() >= _WHOLE):
            entries.append(entry)
    return entries
