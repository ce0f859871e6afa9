"""Removal of secrets, known by the name of their field or by their form, from everything that is written.

Invariant: removing too much is the smaller mistake; a secret that neither name nor form gives away stays.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, cast
from urllib.parse import urlsplit

from adapters.dialects.response_items import SEAL

_REMOVED = "[removed]"
#: Names of fields that hold a secret; the ``token`` of log-probabilities is not one.
_SECRET_FIELD = re.compile(
    r"(authorization|cookie|credential|passw(or)?d|passphrase|secret|private_?key|api_?-?key"
    r"|(access|auth|bearer|id|refresh|session)_?-?token)",
    re.IGNORECASE,
)
#: Where a word begins, also behind an escape of JSON that stands in a text.
_BEGIN = r"(?:\b|(?<=\\[nrt]))"
#: What begins like a JWT, as far as its first part goes, and the rest of one: no part is read for each beginning in it.
_JWT = re.compile(rf"{_BEGIN}eyJ[A-Za-z0-9_-]{{8,}}+(?P<rest>\.[A-Za-z0-9_-]{{8,}}+\.[A-Za-z0-9_-]*)?")
#: Other forms of secrets: keys of providers and of ours, tokens, private keys, passwords in addresses.
_SECRET_TEXT = re.compile(
    rf"{_BEGIN}(sk|pk|rk|xox[abprs]|gh[pousr]|github_pat|glpat|hf|AIza|AKIA|ASIA)[-_]?[A-Za-z0-9][A-Za-z0-9_-]{{14,}}"
    # what we seal is read by anybody, and by no pattern
    rf"|{SEAL}[A-Za-z0-9+/=]{{8,}}"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{8,}"
    r"|(?<=://)[^\s/@:\"\\]+:[^\s/@\"\\]+(?=@)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
#: Such a field with its text, in JSON that cannot be read as such: cut, streamed, or within a text. Its name is read
#: twice, however often a part of it fits.
_SECRET_IN_JSON = re.compile(
    rf"(?<!\\)(?P<quote>\\{{0,15}}\")(?P<name>(?=[\w-]*?{_SECRET_FIELD.pattern})[\w-]*+(?P=quote)\s*:\s*(?P=quote))"
    r".*?(?P<end>(?<!\\)(?P=quote)|\Z)",
    re.IGNORECASE | re.DOTALL,
)
#: The last word of a cut text, which may be part of a secret; and the most of its characters that are left out.
_CUT_WORD, _LONGEST_WORD = re.compile(r"\S+\Z"), 256


def text_without_secrets(text: str) -> str:
    """``text`` with everything that has the form of a secret replaced."""
    return _SECRET_TEXT.sub(_REMOVED, _JWT.sub(lambda match: _REMOVED if match["rest"] else match[0], text))


def _scrubbed(text: str) -> str:
    """``text`` without secrets, those in fields of JSON within it included."""
    plain = _SECRET_IN_JSON.sub(rf"\g<quote>\g<name>{_REMOVED}\g<end>", text) if '"' in text else text
    return text_without_secrets(plain)


def without_secrets(value: Any) -> Any:
    """``value`` (JSON) with secrets replaced, by the name of a field or by the form of a text."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {
            text_without_secrets(name): _REMOVED
            if isinstance(value_of_field, str) and _SECRET_FIELD.search(name)
            else without_secrets(value_of_field)
            for name, value_of_field in fields.items()
        }
    if isinstance(value, list):
        return [without_secrets(item) for item in cast("list[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        # Python reads NaN, and 1e999 as an infinity, for which JSON has no form
        return json.dumps(value)
    return _scrubbed(value) if isinstance(value, str) else value


def readable_body(body: bytes, *, cut: bool = False) -> Any:
    """A body without secrets: JSON as such, other text as text, binary data as its size. If it is ``cut``, and only the
    beginning, its last word is left out."""
    if not body:
        return None
    try:
        if not cut:
            return without_secrets(json.loads(body))
    except (ValueError, RecursionError):
        pass
    try:
        # a cut may go through the middle of a character
        text = body.decode("utf-8", "ignore" if cut else "strict")
    except UnicodeDecodeError:
        return f"[{len(body)} bytes]"
    if "\0" in text:
        return f"[{len(body)} bytes]"
    if cut:
        # the end alone: from each place of a picture's text, the pattern would look as far as it may
        text = text[:-_LONGEST_WORD] + _CUT_WORD.sub("", text[-_LONGEST_WORD:])
    return _scrubbed(text)


def without_credentials(url: str) -> str:
    """``url`` without its user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
