"""What is taken out of whatever is written down: secrets, known by the name of their field or by their form.

Invariant: one removed too many is the lesser mistake; what is not a secret by name or form cannot be known as one.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast
from urllib.parse import urlsplit

_REMOVED = "[removed]"
#: Fields that hold a secret by their name; a sampled ``token`` of log-probabilities is none.
_SECRET_FIELD = re.compile(
    r"(authorization|cookie|credential|passw(or)?d|passphrase|secret|private_?key|api_?-?key"
    r"|(access|auth|bearer|id|refresh|session)_?-?token)",
    re.IGNORECASE,
)
#: Texts that are a secret by their form: keys of providers and of ours, tokens, private keys, passwords in addresses.
_SECRET_TEXT = re.compile(
    r"\b(sk|pk|rk|xox[abprs]|gh[pousr]|github_pat|glpat|hf|AIza|AKIA|ASIA)[-_]?[A-Za-z0-9][A-Za-z0-9_-]{14,}"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{8,}"
    r"|(?<=://)[^\s/@:\"\\]+:[^\s/@\"\\]+(?=@)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
#: What a cut may have left of a secret.
_CUT_WORD = re.compile(r"\S{1,256}\Z")


def text_without_secrets(text: str) -> str:
    """``text`` with what has the form of a secret replaced."""
    return _SECRET_TEXT.sub(_REMOVED, text)


def without_secrets(value: Any) -> Any:
    """``value`` (JSON) with secrets replaced, by the name of a field or by the form of a text."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {
            text_without_secrets(name): _REMOVED
            if isinstance(one, str) and _SECRET_FIELD.search(name)
            else without_secrets(one)
            for name, one in fields.items()
        }
    if isinstance(value, list):
        return [without_secrets(one) for one in cast("list[Any]", value)]
    return text_without_secrets(value) if isinstance(value, str) else value


def told_body(body: bytes, *, cut: bool = False) -> Any:
    """A body as one may write it down: JSON as such, any other text as text, what is neither by its size.

    Args:
        cut: only its beginning is there; its last word then goes.
    """
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
    return text_without_secrets(_CUT_WORD.sub("", text) if cut else text)


def without_credentials(url: str) -> str:
    """``url`` without the user and the password that it may name."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
