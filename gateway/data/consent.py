"""Whether the texts of a request may be kept and trained: by its header, its key, its route, and what they hold.

Invariant: a no of the header or of the key holds, whatever else says yes; where nobody has said anything, the route
decides. Until that is known, nothing may be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from swarm.errors import RequestError

#: What a route takes silence for: of ``opt_out`` for a yes, of ``opt_in`` for a no.
ConsentRule = Literal["opt_out", "opt_in"]
#: What becomes of a group with a private part: of ``none`` nothing else than of others, of ``group`` it is not kept; of
#: ``before_sampling`` alike, but its prompt has placeholders by then.
Redaction = Literal["none", "group", "before_sampling"]

TRAIN_HEADER = "x-swarm-train"
#: A no for all that is left of the session.
NO_SESSION = "false; session"


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
        return self.rules is not None and (_token_ids(texts) or self.rules.private(texts))


def _token_ids(body: Any) -> bool:
    return isinstance(body, dict) and isinstance(cast("dict[str, Any]", body).get("prompt"), list)


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


def consents(rule: ConsentRule, key: bool | None, header: bool | None) -> bool:
    """Whether texts may be kept.

    Args:
        rule: the route's.
        key: what the caller's key says, ``None``: nothing; ``header`` alike, see :func:`header_consent`.
    """
    if key is False or header is False:
        return False
    return rule == "opt_out" or key is True or header is True
