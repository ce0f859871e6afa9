"""What of a text is private, by the rules that are built in, and placeholders in its place.

Invariant: spans do not overlap; a masked text has none, and unmasking gives back every text that was masked. The same
value has the same placeholder in all texts that are masked together.

Rules know forms and checksums, not people: a name, an address or a password in words is nothing to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from gateway.data.addresses import emails, ip_addresses
from gateway.data.numbers import numbers
from gateway.data.secrets import secrets
from gateway.data.spans import Span

_PLACEHOLDER = re.compile(r"\[[A-Z]+_[0-9]+\]")
#: Parts of a message whose texts are data of another kind, such as a picture in base64.
_MEDIA = frozenset({"image_url", "input_audio", "video_url", "file"})


def spans(text: str) -> list[Span]:
    """The private parts of ``text``, in their order."""
    candidates = list(_candidates(text))
    return candidates if len(candidates) < 2 else list(_apart(candidates))


def private(value: Any) -> bool:
    """Whether a text anywhere in ``value`` (JSON) has a private part; pictures and sounds are not read."""
    match value:
        case str():
            return next(_candidates(value), None) is not None
        case dict():
            fields = cast("dict[str, Any]", value)
            return any(name not in _MEDIA and (private(name) or private(field)) for name, field in fields.items())
        case list():
            return any(private(item) for item in cast("list[Any]", value))
        case _:
            return False


def mask(texts: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """``texts`` with placeholders such as ``[EMAIL_1]`` for their private parts, and the value of each placeholder, for
    :func:`unmask`. A placeholder is none that a text already holds."""
    taken = {name for text in texts for name in _PLACEHOLDER.findall(text)}
    placeholders: dict[str, str] = {}
    counts: dict[str, int] = {}

    def placeholder(kind: str, value: str) -> str:
        if value not in placeholders:
            while True:
                counts[kind] = counts.get(kind, 0) + 1
                name = f"[{kind.upper()}_{counts[kind]}]"
                if name not in taken:
                    break
            placeholders[value] = name
        return placeholders[value]

    def masked(text: str) -> str:
        # where a part is gone, its neighbour may stand free and become one
        while private_spans := spans(text):
            parts, end = [], 0
            for span in private_spans:
                parts += [text[end : span.start], placeholder(span.kind, text[span.start : span.end])]
                end = span.end
            text = "".join([*parts, text[end:]])
        return text

    masked_texts = [masked(text) for text in texts]
    return masked_texts, {name: value for value, name in placeholders.items()}


def unmask(text: str, values: Mapping[str, str]) -> str:
    """``text`` with the ``values`` of its placeholders, as :func:`mask` gave them."""
    # a value that was found later may hold an earlier placeholder
    for name, value in reversed(list(values.items())):
        text = text.replace(name, value)
    return text


def _candidates(text: str) -> Iterator[Span]:
    yield from secrets(text)
    yield from emails(text)
    yield from ip_addresses(text)
    yield from numbers(text)


def _apart(candidates: Iterable[Span]) -> Iterator[Span]:
    """Of spans that overlap the first one, and of those the longest."""
    end = 0
    for span in sorted(candidates, key=lambda span: (span.start, -span.end)):
        if span.start >= end:
            yield span
            end = span.end
