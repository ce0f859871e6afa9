"""How a request is answered, by its ``x-swarm-`` headers and its route, and what its answer says about the group.

Invariant: a request without these headers gets exactly its route's settings; a value without meaning is refused by
name; unknown results are left out or null, never guessed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, NoReturn

from gateway.config.route import PassRule, PolicyKind, RouteSettings, WhenBatchWaits
from gateway.data.consent import header_consent
from gateway.types import Incoming
from reward_hooks.contract import texts_of
from swarm.errors import RequestError

POLICY_HEADER = "x-swarm-policy"
WAITS_HEADER = "x-swarm-when-batch-waits"
_LONGEST_DEADLINE = 3600.0
#: Python reads no number of more than 4,300 digits
_QUORUM = re.compile("(?!0+$)[0-9]{1,9}")
_TRAINED = {True: "true", False: "false", None: "pending"}


@dataclass(frozen=True, slots=True)
class ReturnPolicy:
    """How one request is answered.

    Attributes:
        kind: ``best``: judge, then answer; ``first``: stream answer 0 live and judge all in the background.
        quorum: of ``best``: judge as soon as so many answers are there; ``None``: all.
        deadline: of ``best``: judge what is there so many seconds after sampling began; ``None``: no deadline.
        train: whether to claim a group; ``None``: by the route's ``train_fraction``.
        when_batch_waits: of ``best``: what to answer with where no group can be trained.
        asked_for: the request itself asks for this ``kind``; then it gets that, trained or not.
    """

    kind: PolicyKind = "best"
    quorum: int | None = None
    deadline: float | None = None
    train: bool | None = None
    when_batch_waits: WhenBatchWaits = "best"
    asked_for: bool = False

    @classmethod
    def of(cls, settings: RouteSettings, headers: Mapping[str, str]) -> ReturnPolicy:
        """``settings``, overridden by ``x-swarm-policy``, ``x-swarm-train`` and ``x-swarm-when-batch-waits`` of
        ``headers`` (lower-case names).

        ``x-swarm-policy`` is ``first``, ``best``, or ``best`` with options: ``best;quorum=4``, ``best;deadline=2.5``,
        or both. It replaces all policy settings of the route.

        Raises:
            RequestError: a value without meaning; ``param`` names the header.
        """
        train, waits = header_consent(headers), _waits(headers.get(WAITS_HEADER), settings)
        header = headers.get(POLICY_HEADER)
        if header is None:
            return cls(settings.policy, settings.quorum, settings.answer_deadline_seconds, train, waits)
        name, *options = [part.strip() for part in header.split(";")]
        if name == "first" and not options:
            return cls("first", train=train, when_batch_waits=waits, asked_for=True)
        values = {key: value for key, _, value in (option.partition("=") for option in options)}
        quorum, deadline = values.pop("quorum", None), values.pop("deadline", None)
        twice = len(options) > (quorum is not None) + (deadline is not None)
        if name != "best" or values or twice or not (quorum is None or _QUORUM.fullmatch(quorum)):
            _refuse(header)
        seconds = None if deadline is None else _seconds(deadline, header)
        return cls("best", None if quorum is None else int(quorum), seconds, train, waits, asked_for=True)

    @property
    def fans_out(self) -> bool:
        """Whether a request whose group cannot be trained gets the best of an unrecorded group. Not with ``first``:
        nobody would get or learn from the other answers."""
        return self.kind == "best" and self.when_batch_waits == "best"

    def trains(self, settings: RouteSettings, route: str, request_id: str) -> bool:
        """Whether this request claims a group to train; a group of one has nothing to learn from.

        The share of ``train_fraction`` is drawn from the request's id, so that all gateways decide alike, also for a
        repetition under the same id."""
        if settings.num_repeat == 1:
            return False
        if self.train is not None:
            return self.train
        drawn = blake2b(request_id.encode(errors="replace"), key=route.encode()[:64], digest_size=7)
        return int.from_bytes(drawn.digest()) / 2**56 < settings.train_fraction


def passes(settings: RouteSettings, incoming: Incoming) -> str | None:
    """The name of the first rule of ``pass_through`` that fits the request; ``None`` if none does."""
    return next((rule.name for rule in settings.pass_through if _fits(rule, incoming)), None)


def _fits(rule: PassRule, incoming: Incoming) -> bool:
    body, headers = incoming.call.body, incoming.headers
    if rule.path is not None and rule.path != incoming.path:
        return False
    for name, pattern in rule.headers.items():
        if (value := headers.get(name)) is None or not pattern.search(value):
            return False
    if rule.tools is not None and rule.tools != bool(body.get("tools")):
        return False
    if rule.max_tokens is not None:
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        if not isinstance(asked, int) or asked > rule.max_tokens:
            return False
    messages = incoming.call.messages
    if rule.system is not None:
        leading = itertools.takewhile(lambda message: message.get("role") in ("system", "developer"), messages)
        if not rule.system.search("\n".join(text for message in leading for text in texts_of(message))):
            return False
    most = rule.max_prompt_chars
    if most is None:
        return True
    # a prompt of token ids has no messages, and its length is not known
    return bool(messages) and sum(len(text) for message in messages for text in texts_of(message)) <= most


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What is known of a group when its answer leaves.

    Attributes:
        policy_version: of the weights that sampled the first answer.
        reward: of the first answer, as the hook gave it; ``None`` without a score.
        reward_mean: over the answers that were judged with it.
        trained: acknowledged by the swarm server; ``None`` while that is open.
        drop_reason: why the group is not trained.
        hook: the digest of the hook that judged it.
    """

    policy_version: int | None = None
    reward: float | None = None
    reward_mean: float | None = None
    trained: bool | None = None
    drop_reason: str | None = None
    hook: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As JSON: the ``swarm`` object of a stream."""
        return asdict(self)

    def headers(self) -> dict[str, str]:
        """As response headers."""
        values = self.as_dict() | {"trained": _TRAINED[self.trained]}
        return {f"x-swarm-{name.replace('_', '-')}": str(value) for name, value in values.items() if value is not None}


def _waits(value: str | None, settings: RouteSettings) -> WhenBatchWaits:
    match value:
        case None:
            return settings.when_batch_waits
        case "best" | "single":
            return value
        case _:
            raise RequestError(f"{WAITS_HEADER}: {value[:100]!r} is neither best nor single", param=WAITS_HEADER)


def _seconds(value: str, header: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        _refuse(header)
    if not (math.isfinite(seconds) and 0 < seconds <= _LONGEST_DEADLINE):
        _refuse(header)
    return seconds


def _refuse(header: str) -> NoReturn:
    raise RequestError(
        f"{POLICY_HEADER}: {header[:100]!r} is not 'best', 'first', or 'best' with ';quorum=<answers>' or "
        "';deadline=<seconds>'",
        param=POLICY_HEADER,
    )
