"""What finds private parts of a text besides the built-in rules: patterns, functions of one's own, Presidio.

Invariant: a text at which one of them fails is private as a whole; a span has at least one character of its text.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from gateway.redaction.rules import Finder, Rules
from gateway.redaction.spans import Span
from swarm.errors import ConfigError
from swarm.importer import load_attribute

logger = logging.getLogger(__name__)

#: Gives kind, start and end of each private part of a text.
Find = Callable[[str], Iterable[tuple[str, int, int]]]
PRESIDIO = "presidio"
#: What Presidio gives to a form that says little by itself, such as eight digits, once a word beside it fits.
_LEAST_SCORE = 0.4
_NO_LETTER = re.compile(r"[^a-z]+")


def rules_of(patterns: Mapping[str, re.Pattern[str]], finders: Iterable[str]) -> Rules:
    """The built-in rules, ``patterns`` by the names of their kinds, and ``finders`` as a configuration names them.

    Raises:
        ConfigError: a finder cannot be imported.
    """
    return Rules((*(by_pattern(*named) for named in patterns.items()), *map(finder, finders)))


def by_pattern(name: str, pattern: re.Pattern[str]) -> Finder:
    """Finds what ``pattern`` fits, as the kind ``name``."""
    return lambda text: (Span(name, *match.span()) for match in pattern.finditer(text) if match[0])


def finder(spec: str) -> Finder:
    """The finder that a configuration names.

    Raises:
        ConfigError: it cannot be imported.
    """
    find: Find = _presidio() if spec == PRESIDIO else load_attribute(spec)
    if not callable(find):
        raise ConfigError(f"{spec} is no function")

    def spans(text: str) -> Iterator[Span]:
        try:
            parts = [Span(_kind(kind), max(0, start), min(len(text), end)) for kind, start, end in find(text)]
        except Exception as exc:
            # its message may quote the text
            logger.error("%s fails at a text, which counts as private: %s", spec, type(exc).__name__)
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
