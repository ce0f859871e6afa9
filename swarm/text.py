"""Text that came from somebody's code. Invariant: what passed here is valid UTF-8, and nothing of it is lost."""

from __future__ import annotations


def sendable(text: str) -> str:
    """``text`` with lone surrogates, which no answer, log or body can say, spelled as Python escapes them."""
    return text.encode("utf-8", "backslashreplace").decode()
