"""What of a text is private: by the rules that are built in, and by more that a route names: patterns, functions of
one's own, Presidio.

Invariant: spans do not overlap. A text at which one of those that a route names fails is private as a whole.

Rules know forms and checksums, not people: a name, an address or a password in words is nothing to them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import regex

from gateway.redaction.identifiers import Span, emails, ip_addresses, numbers
from gateway.redaction.secrets import secrets
from swarm.errors import ConfigError
from swarm.importer import load_attribute

logger = logging.getLogger(__name__)

#: Gives the private parts of a text, in any order.
Finder = Callable[[str], Iterable[Span]]
#: What stands for a private part, see :mod:`gateway.redaction.masking`.
PLACEHOLDER = re.compile(r"\[[A-Z][A-Z_]*_[0-9]+\]")
#: Of JSON that stands in a text: what is written so is no part of what stands beside it.
_ESCAPE = re.compile(r"\\(?:[nrt/]|u[0-9a-fA-F]{4})")
#: What some write in place of a plus.
_PLUS = "\\u002b"
#: All of them, so that none begins at the second backslash of two.
_ANY_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)", re.DOTALL)
#: Parts of a message whose texts are data of another kind, such as a picture in base64.
_MEDIA = frozenset({"image_url", "input_audio", "video_url", "file"})
#: Gives kind, start and end of each private part of a text.
Find = Callable[[str], Iterable[tuple[str, int, int]]]
PRESIDIO = "presidio"
#: Seconds that a pattern may take on one text; nobody else is answered meanwhile.
_MATCH_SECONDS = 1.0
#: What Presidio gives to a form that says little by itself, such as eight digits, once a word beside it fits.
_LEAST_SCORE = 0.4
_NO_LETTER = re.compile(r"[^a-z]+")


@dataclass(frozen=True)
class Rules:
    """The built-in rules, and ``more``."""

    more: tuple[Finder, ...] = ()

    def spans(self, text: str, *, in_json: bool = False) -> list[Span]:
        """The private parts of ``text``, in their order; ``in_json``: it is JSON, whose escapes stay whole."""
        end, apart = 0, list[Span]()
        # of spans that overlap the first one, and of those the longest
        for span in sorted(self._candidates(text, in_json), key=lambda span: (span.start, -span.end)):
            if span.start >= end:
                apart.append(span)
                end = span.end
        return apart

    def private(self, value: Any) -> bool:
        """Whether a text anywhere in ``value`` (JSON) has a private part; pictures and sounds are not read."""
        match value:
            case str():
                return next(self._candidates(value), None) is not None
            case dict():
                fields = cast("dict[str, Any]", value)
                media = media_in(fields)
                return any(
                    name not in media and (self.private(name) or self.private(field)) for name, field in fields.items()
                )
            case list():
                return any(self.private(item) for item in cast("list[Any]", value))
            case _:
                return False

    def _candidates(self, text: str, in_json: bool = False) -> Iterator[Span]:
        if "\\" not in text:
            yield from self._found_in(text)
            return
        escapes = _ANY_ESCAPE.finditer(text) if in_json else ()
        inside = {at for escape in escapes for at in range(escape.start() + 1, escape.end())}
        cover = bytearray(len(text))
        for span in self._found_in(_ESCAPE.sub(_letter_or_blank if in_json else _blank, text)):
            if text[(plus := span.start + 1 - len(_PLUS)) : span.start + 1].lower() == _PLUS:
                span = span._replace(start=plus)
            if inside.isdisjoint((span.start, span.end)):
                cover[span.start : span.end] = b"x" * (span.end - span.start)
                yield span
        # also as it stands: a backslash may be no escape, as in C:\Users\nadia
        for span in self._found_in(text):
            if inside.isdisjoint((span.start, span.end)) and not any(cover[span.start : span.end]):
                yield span

    def _found_in(self, text: str) -> Iterator[Span]:
        yield from secrets(text)
        yield from emails(text)
        yield from ip_addresses(text)
        yield from numbers(text)
        if self.more:
            placeholders = [match.span() for match in PLACEHOLDER.finditer(text)]
            for find in self.more:
                for span in find(text):
                    # what stands for something private is not
                    if not any(start <= span.start and span.end <= end for start, end in placeholders):
                        yield span


def _blank(escape: re.Match[str]) -> str:
    """As long as ``escape``; a plus or slash is a part of a number."""
    if escape[0].lower() == _PLUS:
        return "+".rjust(len(_PLUS))
    if escape[0][1] == "/":
        return " /"
    return (" " if escape[0][1] in "tu" else "\n") * len(escape[0])


def _letter_or_blank(escape: re.Match[str]) -> str:
    """As long as ``escape``; a Latin letter is part of its word."""
    letter = chr(int(escape[0][2:], 16)) if escape[0][1] == "u" else ""
    return letter * len(escape[0]) if letter.isalpha() and letter < "\u0250" else _blank(escape)


def media_in(fields: Mapping[str, Any]) -> Set[str]:
    """The names of fields that hold a picture or sound, in the chat form or in Anthropic's."""
    return _MEDIA | {"data"} if fields.get("type") == "base64" else _MEDIA


def rules_of(patterns: Mapping[str, re.Pattern[str]], finders: Iterable[str]) -> Rules:
    """The built-in rules, ``patterns`` by the names of their kinds, and ``finders`` as a configuration names them.

    Raises:
        ConfigError: a finder cannot be imported, or a pattern not be read.
    """
    of_patterns = (_guarded(f"the pattern {name}", _by_pattern(name, pattern)) for name, pattern in patterns.items())
    return Rules((*of_patterns, *map(finder, finders)))


def _by_pattern(name: str, pattern: re.Pattern[str]) -> Find:
    """Finds what ``pattern`` fits, as the kind ``name``.

    Raises:
        ConfigError: the ``regex`` package, whose patterns can be given a deadline, does not read it.
    """
    try:
        # with its own (?a) and the like; the number of re.ASCII is another flag there
        bounded = regex.compile(pattern.pattern)
    except regex.error as exc:
        raise ConfigError(f"patterns: {name}: {exc}") from exc
    return lambda text: [(name, *match.span()) for match in bounded.finditer(text, timeout=_MATCH_SECONDS)]


def finder(spec: str) -> Finder:
    """The finder that a configuration names.

    Raises:
        ConfigError: it cannot be imported.
    """
    find: Find = _presidio() if spec == PRESIDIO else load_attribute(spec)
    if not callable(find):
        raise ConfigError(f"{spec} is no function")
    return _guarded(spec, find)


def _guarded(name: str, find: Find) -> Finder:
    """The spans that ``find`` gives; a text at which it fails is private as a whole."""

    def spans(text: str) -> Iterator[Span]:
        try:
            parts = [Span(_kind(kind), max(0, start), min(len(text), end)) for kind, start, end in find(text)]
        except (Exception, SystemExit) as exc:
            # its message may quote the text
            why = f"takes more than {_MATCH_SECONDS:g} s" if isinstance(exc, TimeoutError) else "fails"
            logger.error("%s %s at a text, which counts as private: %s", name, why, type(exc).__name__)
            parts = [Span("private", 0, len(text))]
        return (part for part in parts if part.start < part.end)

    return spans


def _kind(name: str) -> str:
    return _NO_LETTER.sub("_", name.lower()).strip("_") or "private"


def _presidio() -> Find:
    # its errors quote what it looks at
    logging.getLogger("presidio-analyzer").setLevel(logging.CRITICAL)
    try:
        engine: Any = import_module("presidio_analyzer").AnalyzerEngine(default_score_threshold=_LEAST_SCORE)
        # what it fetches for its first address, no request waits for
        engine.analyze(text="nobody@example.org", language="en")
    except (Exception, SystemExit) as exc:
        # spaCy's download of a model exits
        how = "pip install presidio-analyzer, python -m spacy download en_core_web_lg"
        raise ConfigError(f"presidio cannot be used: {exc}; {how}") from exc
    return lambda text: [(part.entity_type, part.start, part.end) for part in engine.analyze(text=text, language="en")]
