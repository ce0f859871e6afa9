"""``Webhook``: tells an address when a challenger moves, when it waits for a person, and of alarms of the training.

Invariant: it hinders nothing. What cannot be told in a few tries is logged and forgotten; a server that begins again
tells again what still waits, and which alarms there are.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from swarm.concurrency import backoff
from swarm.evidence.alarms import Alarm
from swarm.http.client import ConnectionBrokenError, HttpClient, has_proxy
from swarm.protocol import PolicyStatus

logger = logging.getLogger(__name__)

#: Seconds between two looks, of one try, and before the next one.
_LOOK, _TRY, _FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 10.0, 1.0, 10.0
_TRIES = 4


class Webhook:
    """POSTs JSON: ``event`` (``moved`` or ``waits``), ``text`` for people, and ``policy``; or ``alarm`` and
    ``alarm_over``, ``text``, and ``alarm``.

    Args:
        url: whom it tells; its path is as good as a key and is not logged.
        policies: the challengers as they stand.
        alarms: those of the training.
    """

    def __init__(
        self, url: str, policies: Callable[[], Iterable[PolicyStatus]], alarms: Callable[[], Iterable[Alarm]]
    ) -> None:
        self._url = url
        self._host = urlsplit(url).netloc.rpartition("@")[2]
        self._policies = policies
        self._alarms = alarms
        self._raised: dict[str, Alarm] = {}
        self._reported: dict[tuple[str, str], tuple[float, str]] = {}

    async def run(self) -> None:
        """Look and tell until it is cancelled."""
        http = HttpClient(proxies=has_proxy(self._url))
        try:
            while True:
                for policy in list(self._policies()):
                    for event in self._new(policy):
                        about = f"route {policy.stage.route} {event}"
                        content = {"text": _text(event, policy), "policy": policy.model_dump(mode="json")}
                        await self._tell(http, about, {"event": event, **content})
                for event, alarm in self._changed():
                    text = alarm.sentence if event == "alarm" else f"over: {alarm.sentence}"
                    content = {"text": text, "alarm": alarm.model_dump(mode="json")}
                    await self._tell(http, f"{event} {alarm.kind}", {"event": event, **content})
                await asyncio.sleep(_LOOK)
        finally:
            await http.close()

    def _new(self, policy: PolicyStatus) -> list[str]:
        """What has happened to it since the last look."""
        stage = policy.stage
        share, waits = self._reported.get(stage.key, (stage.share, ""))
        self._reported[stage.key] = stage.share, policy.waits
        moved = ["moved"] if stage.share != share else []
        return [*moved, "waits"] if policy.waits not in ("", waits) else moved

    def _changed(self) -> list[tuple[str, Alarm]]:
        """The alarms that have begun since the last look, and those that are over."""
        before, self._raised = self._raised, {alarm.kind: alarm for alarm in self._alarms()}
        begun = [("alarm", alarm) for name, alarm in self._raised.items() if name not in before]
        over = (alarm for name, alarm in before.items() if name not in self._raised)
        # nobody waits for a person because of what is over
        return begun + [("alarm_over", alarm.model_copy(update={"pauses": False})) for alarm in over]

    async def _tell(self, http: HttpClient, about: str, content: dict[str, Any]) -> None:
        wrong = ""
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(backoff(attempt, _FIRST_PAUSE, _LONGEST_PAUSE))
            try:
                answer = await http.post(
                    self._url, json.dumps(content).encode(), {"content-type": "application/json"}, _TRY
                )
            except (ConnectionBrokenError, TimeoutError) as exc:
                wrong = str(exc).replace(self._url, self._host) or "no answer"
                continue
            if answer.status < 300:
                return
            wrong = f"HTTP {answer.status}"
        logger.warning("the webhook at %s was not told that %s: %s", self._host, about, wrong)


def _text(event: str, policy: PolicyStatus) -> str:
    stage, verdict = policy.stage, policy.verdict
    of = f"route {stage.route}, version {stage.challenger} against {stage.incumbent}"
    if event == "moved":
        return f"{of}: {stage.label}, by {stage.by}: {stage.why}"
    proven = f": {verdict.sentence}" if verdict is not None else ""
    return f"{of} waits for a person ({policy.waits}){proven}"
