"""Keys and tokens, known by the prefixes that their issuers give them, JWTs, and private keys in PEM.

Invariant: what is found has the length that its issuer gives it, and looks drawn at random where the prefix alone could
begin a name.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator

from gateway.redaction.identifiers import Span

#: What follows each prefix.
_FORMS = {
    prefix: re.compile(rest)
    for prefix, rest in {
        # OpenAI and many others
        "sk-": r"[\w-]{20,250}",
        # Stripe
        **dict.fromkeys(("sk_live_", "sk_test_", "rk_live_"), r"[A-Za-z0-9]{16,200}"),
        "whsec_": r"[A-Za-z0-9+/]{32,64}=?",
        # GitHub, GitLab
        **dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"[A-Za-z0-9]{36,251}"),
        "github_pat_": r"[A-Za-z0-9]{22}_[A-Za-z0-9]{59}",
        "glpat-": r"[\w-]{20,64}",
        # AWS
        **dict.fromkeys(("AKIA", "ASIA"), r"[A-Z2-7]{16}"),
        # Slack
        **dict.fromkeys(("xoxb-", "xoxp-"), r"[0-9]{6,}-[A-Za-z0-9-]{10,200}"),
        "xoxa-": r"[0-9]-?[A-Za-z0-9-]{10,200}",
        # Google
        "AIza": r"[\w-]{35}",
        "ya29.": r"[\w-]{20,400}",
        # Hugging Face, npm, PyPI, SendGrid, DigitalOcean
        "hf_": r"[A-Za-z0-9]{34,40}",
        "npm_": r"[A-Za-z0-9]{36}",
        "pypi-AgE": r"[\w-]{50,400}",
        "SG.": r"[\w-]{22}\.[\w-]{43}",
        "dop_v1_": r"[0-9a-f]{64}",
    }.items()
}
#: By a character that they all have, so that a text without it is not searched for each.
_PREFIXES = {mark: [prefix for prefix in _FORMS if mark in prefix] for mark in "_-."}
_PREFIXES["A"] = [prefix for prefix in _FORMS if prefix.isalpha()]
#: Part of a generic key that no word of a name is: letters and digits in one piece.
_RANDOM = re.compile(r"(?=[A-Za-z]*[0-9])(?=[0-9]*[A-Za-z])[A-Za-z0-9]{16,}")
#: The first part of a JWT begins so; its longest, what that is made of, and what follows it.
_JWT_BEGIN, _SHORTEST_HEAD, _LONGEST_HEAD = "eyJ", 8, 2003
_JWT_HEAD, _JWT_REST = re.compile(r"[\w-]++"), re.compile(r"\.[\w-]{4,8000}+\.[\w-]{0,2000}+")
_PEM_BEGIN = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_PEM_END = re.compile(r"-----END (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
#: What a key is made of; JSON and environment files write its lines with ``\n``.
_PEM_BODY = re.compile(r"[A-Za-z0-9+/=:,.\s\\-]{40,}")


def secrets(text: str) -> Iterator[Span]:
    """Keys, tokens and private keys."""
    for mark, prefixes in _PREFIXES.items():
        if mark in text:
            for prefix in prefixes:
                if prefix in text:
                    yield from _issued(text, prefix)
    yield from _jwts(text)
    if "-----BEGIN" in text:
        yield from _private_keys(text)


def _issued(text: str, prefix: str) -> Iterator[Span]:
    """Keys of the issuer with that prefix."""
    form, at = _FORMS[prefix], text.find(prefix)
    while at >= 0:
        match = None if _in_a_word(text, at) else form.match(text, at + len(prefix))
        end = at + len(prefix) if match is None else match.end()
        if match is not None and not text[end : end + 1].isalnum() and (prefix != "sk-" or _is_random(match[0])):
            yield Span("secret", at, end)
        at = text.find(prefix, end)


def _jwts(text: str) -> Iterator[Span]:
    """Each stretch of what a head is made of is read once, however many heads may begin in it."""
    at = text.find(_JWT_BEGIN)
    while at >= 0:
        stretch = _JWT_HEAD.match(text, at)
        assert stretch is not None, "it begins with what it is made of"
        end = stretch.end()
        rest = _JWT_REST.match(text, end) if end - at >= _SHORTEST_HEAD else None
        start = -1 if rest is None else text.find(_JWT_BEGIN, max(at, end - _LONGEST_HEAD), end)
        while start >= 0 and (_in_a_word(text, start) or not _has_header(text[start:end])):
            start = text.find(_JWT_BEGIN, start + 1, end)
        if rest is not None and start >= 0:
            end = rest.end()
            yield Span("secret", start, end)
        at = text.find(_JWT_BEGIN, end)


def _private_keys(text: str) -> Iterator[Span]:
    """A block without its end lasts as long as it looks like a key."""
    end = 0
    while (begin := _PEM_BEGIN.search(text, end)) is not None:
        body = _PEM_BODY.match(text, begin.end())
        end = begin.end()
        if body is None:
            continue
        # the body may take the dashes of the last line
        last = _PEM_END.search(text, begin.end(), body.end() + 80)
        end = body.end() if last is None else last.end()
        yield Span("secret", begin.start(), end)


def _in_a_word(text: str, at: int) -> bool:
    before = text[at - 1 : at]
    return before.isalnum() or before == "_"


def _is_random(rest: str) -> bool:
    """Whether what follows ``sk-`` is a key and not a name such as ``sk-fading-circle-delay``."""
    kind, dash, key = rest.partition("-")
    if dash and kind in ("proj", "svcacct", "admin", "ant", "or", "lf", "swarm"):
        return any(mark.isdigit() for mark in key)
    return _RANDOM.search(rest) is not None


def _has_header(head: str) -> bool:
    """Whether the first part of a JWT is JSON that names an algorithm (RFC 7515)."""
    try:
        header = json.loads(base64.urlsafe_b64decode(head + "=" * (-len(head) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        return False
    return isinstance(header, dict) and "alg" in header
